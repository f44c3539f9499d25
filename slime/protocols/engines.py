"""What the loop needs of the rollout engine and of the engine pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Protocol, TypeAlias

import numpy as np

from slime.types import SamplingParams

FinishReason = Literal["stop", "length", "abort"]
VERSIONS = "token_versions"
"""Engine column: the version of the weights that sampled each token, int32 [tokens]. Every answer may have it."""
UNKNOWN_VERSION = -2
"""Value in that column for a token that no engine sampled, or whose engine does not report it."""
KEPT = "kept_tokens"
"""Engine column: (the ids that top-p, top-k and min-p kept, int32; their number for each token, int32 [tokens]), where
a token that kept more ids than the request's argument has the number 0."""
TOP = "top_tokens"
"""Engine column: (ids, int32 [tokens, K]; log-probs in nats, float32 [tokens, K]) of the K likeliest ids of each token,
likeliest first. K is the request's argument."""
EXPERTS = "routed_experts"
"""Engine column: the experts of each token, an unsigned integer array [tokens, layers, experts of a token]. The rows
begin at the token of the request's argument, prompt included, and end before the last token, which is never computed.
"""
Arrays: TypeAlias = tuple[np.ndarray, ...]
"""The arrays of one engine column."""
OnTokens = Callable[[int, list[int], list[float]], None]
"""Called with the place of the first of some new tokens in the completion, their ids and their log-probs."""


@dataclass(frozen=True)
class GenerateResult:
    """One completion."""

    token_ids: list[int]
    log_probs: list[float]
    """Nats under the temperature-scaled distribution, one per token of `token_ids`."""
    text: str
    finish_reason: FinishReason
    weight_versions: list[int]
    """Of the weights that sampled the tokens, oldest first (one entry when it is one version)."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue_s: float | None = None
    """How long the request waited in the engine before that first computed. None where the engine does not say."""
    preemptions: int = 0
    """How often the engine gave its memory to another request and computed it again. 0 where it does not say."""
    decode_tokens_per_s: float | None = None
    """Its speed after the first token. None where the engine does not say."""
    columns: Mapping[str, Arrays] = field(default_factory=dict, compare=False)
    """The engine columns of this answer by their names: those of the request, `VERSIONS`, and others with one number
    per token of `token_ids`."""
    speculation: tuple[int, int, int] | None = None
    """Passes that checked a draft, drafted tokens, accepted tokens. None where the engine does not say."""

    @property
    def token_columns(self) -> dict[str, list[float]]:
        """The columns with one number per token, as lists. `VERSIONS` is among them where each token's is known."""
        plain = {name: arrays[0] for name, arrays in self.columns.items() if len(arrays) == 1}
        found = {name: array.tolist() for name, array in plain.items() if array.ndim == 1}
        if VERSIONS not in found and len(self.weight_versions) == 1:
            found[VERSIONS] = self.weight_versions * len(self.token_ids)
        return found


@dataclass(frozen=True)
class ScoreResult:
    """Log-probs of n given tokens in nats, over the whole vocabulary."""

    log_probs: np.ndarray
    """float32 [n]."""
    top: tuple[np.ndarray, np.ndarray] | None = None
    """Where asked for: the ids, int32 [n, K], of the K most probable tokens at each place, most probable first, and
    their log-probs, float32 [n, K]."""
    weight_versions: list[int] = field(default_factory=list)
    """The versions live when the request entered and left the engine (one entry when equal)."""


class RolloutEngine(Protocol):
    """A served model. Implementations are picklable: they travel to the rollout manager's process."""

    streams: bool
    """Whether `generate` takes `on_tokens`. Otherwise a completion comes when it is whole."""

    async def context_tokens(self, deadline_s: float) -> int:
        """The most tokens of a prompt with its completion, a number that does not change. Retries as `generate` does.
        The limit of an engine without this method is unknown."""
        ...

    async def generate(
        self,
        token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        seed: int,
        deadline_s: float,
        columns: Mapping[str, int] = MappingProxyType({}),
        session: str | None = None,
        on_tokens: OnTokens | None = None,
    ) -> GenerateResult:
        """Sample one completion; retry transient faults until `deadline_s` seconds have passed, then TimeoutError.

        `session`: requests of one session go to the same engine where the router's policy allows it, for its cache of
        prefixes.

        `on_tokens` gets tokens while the completion is made, which changes neither them nor the result. The last ones
        may come with the result alone. After a fault the places begin at 0 again, and the tokens may be others.

        `columns` maps the name of each engine column that the answer shall have to its argument, such as {TOP: 8}.
        ValueError for a column that the engine cannot give.

        `sampling_params` uses slime's names: temperature, top_p, top_k, max_new_tokens, min_new_tokens, stop,
        stop_token_ids, skip_special_tokens. A prompt the engine refuses raises ValueError at once.
        """
        ...

    async def score(
        self, token_ids: list[int], *, start: int, top_k: int = 0, deadline_s: float
    ) -> ScoreResult:
        """The log-probs of `token_ids[start:]`, each given the tokens before it. Retries as `generate` does.

        They are at temperature 1, whatever samples are drawn at, unless the model is served with its logits divided
        by a temperature (`slime.roles.served.ServedModel`). ValueError for a `start` outside [1, n), because nothing
        predicts the first token, and for tokens that the engine refuses.
        """
        ...

    async def abort_all(self) -> None:
        """End every running request; each returns what it has with finish_reason "abort"."""
        ...

    async def close(self) -> None: ...


class EnginePool(Protocol):
    """The running engines, as the driver sees them."""

    @property
    def facts(self) -> Mapping[str, object]:
        """What hooks find in their `args` besides the flags, such as the address of the router."""
        ...

    def client(self) -> RolloutEngine | None:
        """What the rollout manager sends its requests to; None without engines."""
        ...

    def launch(self) -> None:
        """Starts the processes of the engines. Those that share a device with a trainer wait until `wait_ready`."""
        ...

    def check_launched(self) -> None:
        """Raises an error if a process of an engine or of its router has ended. For use between the two other calls."""
        ...

    def wait_ready(self) -> None:
        """Returns when the engines serve."""
        ...

    def publish(self, version: int) -> Mapping[str, float]:
        """Load the trainer's current weights, as `version`, on every engine; generation pauses meanwhile. Returns the
        metrics of the update."""
        ...

    def allow_restarts(self) -> None:
        """Count restarts of engines anew: a frozen model has no updates after which a pool does so itself."""
        ...

    def sleep(self) -> None:
        """Give the devices to the trainer."""
        ...

    def wake(self) -> bool:
        """Take the devices back. True: the engines dropped their weights to sleep, and serve after the next update."""
        ...

    def check_health(self) -> None:
        """Raise RuntimeError with the engine's last log lines when an engine is lost for good."""
        ...

    def stop(self) -> None: ...


class NoEngines:
    """The pool of a run that only trains (--debug-train-only): there is nothing to update, put to sleep or lose."""

    facts: Mapping[str, object] = MappingProxyType({})

    def client(self) -> None: ...

    def launch(self) -> None: ...

    def check_launched(self) -> None: ...

    def wait_ready(self) -> None: ...

    def publish(self, version: int) -> Mapping[str, float]:
        return {}

    def allow_restarts(self) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> bool:
        return False

    def check_health(self) -> None: ...

    def stop(self) -> None: ...
