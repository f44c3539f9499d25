"""What the rollout engine, its pool, and the trainer must offer to the loop. slime codes against these names only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from slime.types import SampleGroup

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class GenerateResult:
    """One completion. `log_probs` are nats under the temperature-scaled distribution, one per token of `token_ids`.

    `weight_versions` are the versions live when the request entered and left the engine (one entry when equal).
    `queue_s` is how long it waited in the engine before that first computed, `decode_tokens_per_s` its speed after the
    first token; None where the engine does not say. `routed_experts`, where asked for: the experts that each token
    was sent to, as an unsigned integer array [tokens, layers, experts of a token]. `columns`: other values of the
    engine, one per token of `token_ids`, by the names that `slime.data.columns` has for them.
    """

    token_ids: list[int]
    log_probs: list[float]
    text: str
    finish_reason: FinishReason
    weight_versions: list[int]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue_s: float | None = None
    decode_tokens_per_s: float | None = None
    routed_experts: Any = None
    columns: dict[str, list[float]] = field(default_factory=dict)


class RolloutEngine(Protocol):
    """A served model. Implementations are picklable: they travel to the rollout manager's process."""

    async def generate(
        self,
        token_ids: list[int],
        sampling_params: dict[str, Any],
        *,
        seed: int,
        deadline_s: float,
        experts_from: int | None = None,
    ) -> GenerateResult:
        """Sample one completion; retry transient faults until `deadline_s` seconds have passed, then TimeoutError.

        `experts_from`: `routed_experts` shall hold the tokens from that place on, prompt included, up to the last but
        one (the last was never fed back). None: it stays None.

        `sampling_params` uses slime's names: temperature, top_p, top_k, max_new_tokens, min_new_tokens, stop,
        stop_token_ids, skip_special_tokens. A prompt the engine refuses raises ValueError at once.
        """
        ...

    async def abort_all(self) -> None:
        """End every running request; each returns what it has with finish_reason "abort"."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class WeightUpdate:
    """One published version of the weights, or a part of one: what a channel hands to engines, as plain data.

    `info` is channel-specific and JSON-serialisable (for the file channel: {"path": ...}). `checksums`, when asked
    for with --check-weight-update-equal, maps HF tensor name to the sha256 hex digest of its raw bytes. `lasting`: all
    of the weights, for as long as they are the newest; otherwise gone when the part after the next is asked for.
    """

    version: int
    info: dict[str, Any]
    checksums: dict[str, str] | None = None
    lasting: bool = True


class EnginePool(Protocol):
    """The running engines, as the driver sees them."""

    def update_weights(self, parts: Callable[[dict[str, int]], Iterator[WeightUpdate]]) -> None:
        """Load all parts of one version on every engine (generation paused meanwhile).

        `parts` is told who will take them: the workers of each engine, by a name that changes when it restarts. It is
        asked again, for the engines that are left, when one dies in the middle of parts that all take together
        (`info["group"]`, see slime.weight_sync.group).
        """
        ...

    def sleep(self) -> None:
        """Give the devices to the trainer."""
        ...

    def wake(self) -> bool:
        """Take them back. True: the engines have dropped their weights to sleep, and serve from the next update on."""
        ...

    def check_health(self) -> None:
        """Raise RuntimeError with the engine's last log lines when one is lost beyond recovery."""
        ...

    def stop(self) -> None: ...


class NoEngines:
    """The pool of a run that only trains (--debug-train-only): there is nothing to update, put to sleep or lose."""

    def update_weights(self, parts: Callable[[dict[str, int]], Iterator[WeightUpdate]]) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> bool:
        return False

    def check_health(self) -> None: ...

    def stop(self) -> None: ...


@dataclass(frozen=True)
class RolloutBatch:
    """What one rollout hands to training: a reference to the data of each data-parallel rank, its metrics, and of the
    samples that are trained on, all ranks together: their tokens, prompts included, and the FLOPs of one forward pass
    over them (`slime.data.packing.sample_flops`)."""

    rank_data: list[Any]
    metrics: dict[str, float]
    tokens: int
    forward_flops: float


class RolloutHandle(Protocol):
    """The rollout manager, as the driver sees it. Calls run in the order they were made."""

    def generate(self, rollout_id: int) -> Future[RolloutBatch]: ...

    def evaluate(self, rollout_id: int) -> Future[dict[str, float]]: ...

    def progress(self) -> tuple[int, int]:
        """(samples finished, samples wanted) of what runs now; answers at once."""
        ...


class TrainerHandle(Protocol):
    """All trainer ranks, as the driver sees them."""

    @property
    def start_rollout_id(self) -> int:
        """The first rollout to train: 0, or the one after the loaded checkpoint."""
        ...

    def train(self, rollout_id: int, rank_data: list[Any]) -> Future[TrainResult]: ...

    def progress(self) -> tuple[int, int]:
        """(micro-batches trained, micro-batches of the rollout) on one rank; answers at once."""
        ...

    def save(self, rollout_id: int) -> Future[None]: ...

    def next_weights(self, version: int, receivers: dict[str, int]) -> Future[WeightUpdate | None]:
        """The first part of the weights as `version`, then the next one a call, None after the last.

        A call makes a part while engines load the one before. `receivers`: see EnginePool.update_weights; with others
        than in the call before, all parts come anew.
        """
        ...


@dataclass(frozen=True)
class TrainResult:
    """`steps`: train/* metrics of each optimizer step; `rollout`: rollout/* means over the data; `perf`: perf/* of
    rank 0."""

    steps: list[dict[str, float]]
    rollout: dict[str, float]
    perf: dict[str, float]


class DataSource(Protocol):
    """Where prompts come from and unfinished groups return to (`--data-source-path`)."""

    def get_samples(self, num_groups: int) -> list[SampleGroup]: ...

    def add_samples(self, groups: list[SampleGroup]) -> None: ...

    def save(self, rollout_id: int) -> None: ...

    def load(self, rollout_id: int) -> None: ...

    def __len__(self) -> int: ...
