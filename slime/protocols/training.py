"""What the loop needs of the rollout manager and of the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from slime.types import SampleGroup


@dataclass(frozen=True)
class Logged:
    """What one call of `slime.tracking.outbox.log` has logged at a step of rollout/step, train/step or eval/step."""

    metrics: dict[str, float]
    step: int
    step_key: str


@dataclass(frozen=True)
class ShownSample:
    """A sample for the console: the end of its prompt, and the beginning of its response."""

    prompt: str
    response: str
    label: str
    reward: str
    status: str


@dataclass(frozen=True)
class RolloutBatch:
    """What one rollout hands to training. Tokens and FLOPs are of the samples that are trained on, all ranks
    together."""

    rank_data: list[object]
    """A reference to the data of each data-parallel rank, of one group of trainer ranks after the other
    (`slime.roles.groups`)."""
    metrics: dict[str, float]
    tokens: int
    """Prompts included. A prompt that several samples share counts for each of them."""
    forward_flops: float
    """Of one forward pass (`slime.data.packing.forward_flops`). A shared prompt counts as often as it is computed."""
    old_flops: float = 0.0
    """The same of the pass for old log-probs, which may leave out the samples of the first step."""
    ahead_flops: float = 0.0
    """FLOPs of training the layers of multi-token prediction."""
    logged: list[Logged] = field(default_factory=list)
    learning: dict[str, float] = field(default_factory=dict)
    learning_texts: dict[str, str] = field(default_factory=dict)
    """Both from `slime.rollout.learning`."""
    sample: ShownSample | None = None
    """The first one of the rollout."""


@dataclass(frozen=True)
class Evaluated:
    """The result of an evaluation."""

    metrics: dict[str, float]
    """eval/*; none if a function of the user has logged them."""
    logged: list[Logged] = field(default_factory=list)
    held_out: dict[str, list[object]] = field(default_factory=dict)
    """Held-out set -> one reference to data per data-parallel rank. The trainer computes the loss."""


class RolloutHandle(Protocol):
    """The rollout manager, as the driver sees it."""

    def generate(self, rollout_id: int, saves: bool, version: int) -> Future[RolloutBatch]:
        """The data of rollout `rollout_id`; its groups may be started from now on, and the engines have the weights
        `version`. `saves`: a checkpoint follows it, so the data position is saved, too. Calls end in their order."""
        ...

    def evaluate(self, rollout_id: int) -> Future[Evaluated]:
        """Evaluate with the present weights, beside rollouts that run ahead."""
        ...

    def progress(self) -> tuple[int, int]:
        """(samples finished, samples wanted) of what runs now; answers at once."""
        ...


class TrainerHandle(Protocol):
    """All trainer ranks, as the driver sees them."""

    @property
    def start_rollout_id(self) -> int:
        """The first rollout to train: 0, or the one after the loaded checkpoint."""
        ...

    def train(self, rollout_id: int, rank_data: list[object]) -> Future[TrainResult]: ...

    def evaluate(self, rollout_id: int, held_out: Mapping[str, list[object]]) -> Future[dict[str, float]]:
        """eval/* metrics of held-out sets with the weights after `rollout_id` rollouts. Changes no state."""
        ...

    def progress(self) -> tuple[int, int]:
        """(micro-batches trained, micro-batches of the rollout) on one rank; answers at once."""
        ...

    def save(self, rollout_id: int) -> Future[None]:
        """Save a checkpoint. With --async-save, done when the values are copied."""
        ...

    def finish_save(self) -> Future[None]:
        """Done when the files of the last save are complete."""
        ...


@dataclass(frozen=True)
class TrainResult:
    """The metrics of training on one rollout."""

    steps: list[dict[str, float]]
    """train/* of each optimizer step."""
    rollout: dict[str, float]
    """rollout/* means over the data."""
    perf: dict[str, float]
    """perf/* of rank 0."""
    logged: list[Logged] = field(default_factory=list)


class DataSource(Protocol):
    """Where prompts come from and unfinished groups return to (`--data-source-path`)."""

    def get_samples(self, num_groups: int) -> list[SampleGroup]: ...

    def add_samples(self, groups: list[SampleGroup]) -> None: ...

    def save(self, rollout_id: int) -> None: ...

    def load(self, rollout_id: int) -> None: ...

    def __len__(self) -> int: ...
