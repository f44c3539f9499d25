"""This module defines the records of an update of the engines' weights, and the interface of its source."""

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
    """Describes the content of an update of the engines' weights. The trainer's publisher adds the record to every
    part, channels send it unchanged, and the receiver has one loader per kind.

    Example::

        adapter = WeightSet("adapter", base_version=CHECKPOINT, name="policy", settings={"r": 8})
        WeightSet.of(adapter.message()["weights"]) == adapter  # True
    """

    kind: WeightKind = "full"
    """full: all weights by their HF names. adapter: the matrices of a LoRA adapter by PEFT's names. delta: the changes
    since the base, a `slime.weight_sync.delta.payload` per tensor, by its HF name."""
    base_version: int | None = None
    """The version of the weights that the set is applied to. None for a set that needs no base."""
    name: str = ""
    """The name of an adapter in requests; empty for other kinds."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """For an adapter, PEFT's adapter_config.json. With --update-weight-mode delta: {"chain", "version"}, and for a
    delta also {"tensors" (their number), "compare", "refusals" (see slime.weight_sync.delta)}."""

    def message(self) -> dict[str, object]:
        """Returns the record as plain data. The result is empty for full weights, the default of a message."""
        return {} if self == FULL else {"weights": asdict(self)}

    @classmethod
    def of(cls, record: Mapping[str, Any] | None) -> WeightSet:
        """Returns the record of an engine's message. Raises ValueError for a kind that this version does not
        support."""
        fields = dict(record or {})
        if (kind := fields.get("kind", "full")) not in get_args(WeightKind):
            raise ValueError(
                f"a set of weights must be one of {', '.join(get_args(WeightKind))}, got {kind}; trainer and engine "
                "must have the same version"
            )
        return cls(**fields)


FULL = WeightSet()


@dataclass(frozen=True)
class WeightUpdate:
    """A published version of the weights, or a part of the version, as plain data."""

    version: int
    channel: str
    """The channel's name in slime.weight_sync.registry."""
    info: Mapping[str, Any]
    """JSON-serialisable values of the channel (for a file: {"path": ...})."""
    lasting: bool = True
    """True if the update has all weights and stays readable while it is the newest version. Otherwise the part is freed
    when the second part after it is requested."""
    weights: WeightSet = FULL
    """Describes the content of all parts of the update together."""
    size_bytes: int | None = None
    """Number of bytes that an engine receives for this part; None if unknown."""
    density: float = 1.0
    """Share of the weights' bytes that belong to values which the whole update changes."""

    def message(self) -> dict[str, object]:
        """Returns the fields that are sent to engines."""
        return {"channel": self.channel, "info": self.info, **self.weights.message()}


class WeightSource(Protocol):
    """The interface of all trainer ranks for the engine pool."""

    def next_weights(self, version: int, receivers: dict[str, int]) -> Future[WeightUpdate | None]:
        """Returns the first part of the weights as `version`. Later calls return the next parts, and finally None.

        The trainer prepares a part while engines load the previous part. `receivers` maps each engine that loads the
        parts to its number of workers; the engine's name changes when it restarts. If `receivers` differ from the
        previous call, all parts are sent again. A version that is requested again is sent as the whole set.
        """
        ...

    def weights_file(self) -> Future[WeightUpdate]:
        """Returns a file with the current weights, for an engine that starts between two updates. Any thread may call
        this."""
        ...
