"""The records of an update of the engines' weights, and what gives its parts."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, get_args

WeightKind = Literal["full", "adapter", "delta"]
CHECKPOINT = -1
"""The `WeightSet.base_version` of the weights in the engine's own checkpoint, which never change."""


@dataclass(frozen=True)
class WeightSet:
    """What an update of the engines' weights holds. The trainer's publisher puts the record on every part, channels
    carry it unchanged, and the receiver has one loader per kind."""

    kind: WeightKind = "full"
    """full: all weights by their HF names. adapter: the matrices of a LoRA adapter by PEFT's names. delta: what changed
    since the base, one `slime.weight_sync.delta.payload` by the HF name of each tensor."""
    base_version: int | None = None
    """The version of the weights that the set is applied to. None for a set that needs no others."""
    name: str = ""
    """Of an adapter: what requests call it."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of an adapter: PEFT's adapter_config.json. With --update-weight-mode delta: {"chain", "version"}, and of a delta
    also {"tensors" (their number), "compare", "refusals" (see slime.weight_sync.delta)}."""

    def message(self) -> dict[str, object]:
        """The record as plain data. Empty for full weights: a message without a record means them."""
        return {} if self == FULL else {"weights": asdict(self)}

    @classmethod
    def of(cls, record: Mapping[str, Any] | None) -> WeightSet:
        """The record of an engine's message. ValueError for a kind that this version does not know."""
        given = dict(record or {})
        if (kind := given.get("kind", "full")) not in get_args(WeightKind):
            raise ValueError(
                f"a set of weights must be one of {', '.join(get_args(WeightKind))}, got {kind}; trainer and engine "
                "must have the same version"
            )
        return cls(**given)


FULL = WeightSet()


@dataclass(frozen=True)
class WeightUpdate:
    """One published version of the weights, or a part of it, as plain data."""

    version: int
    channel: str
    """Its name in slime.weight_sync.registry."""
    info: Mapping[str, Any]
    """That channel's own, JSON-serialisable (of a file: {"path": ...})."""
    lasting: bool = True
    """These are all weights, for as long as they are the newest. Otherwise they are gone when the part after the
    next one is asked for."""
    weights: WeightSet = FULL
    """What all parts of the update hold together."""
    size_bytes: int | None = None
    """Bytes that an engine gets of this part; None: not known."""
    density: float = 1.0
    """Of the whole update: the share of the weights' bytes that belong to values which it changes."""

    def message(self) -> dict[str, object]:
        """What engines get of it."""
        return {"channel": self.channel, "info": self.info, **self.weights.message()}


class WeightSource(Protocol):
    """All trainer ranks, as the engine pool sees them."""

    def next_weights(self, version: int, receivers: dict[str, int]) -> Future[WeightUpdate | None]:
        """The first part of the weights as `version`; each further call gives the next part, and None after the last.

        The trainer makes a part while engines load the part before. `receivers`: the number of workers of each engine
        that will take the parts, by a name that changes when the engine restarts. With other receivers than in the call
        before, all parts come again. A version that is asked for again comes as the whole set.
        """
        ...

    def weights_file(self) -> Future[WeightUpdate]:
        """The current weights in a file, for an engine that starts between two updates. May be called by any thread."""
        ...
