"""This module defines the interfaces of the rollout manager, the trainer and the data source, and their results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from slime.checkpoints.memory_files import StoredState
from slime.types import SampleGroup


@dataclass(frozen=True)
class Logged:
    """The metrics of a call of `slime.tracking.outbox.log`, at a step of rollout/step, train/step or eval/step."""

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
    """The result of a rollout for the trainer. Tokens and FLOPs count only trained samples, over all ranks."""

    rank_data: list[object]
    """A reference to the data of each data-parallel rank, ordered by groups of trainer ranks (`slime.roles.groups`)."""
    metrics: dict[str, float]
    tokens: int
    """Number of tokens, including prompts. A prompt that several samples share counts for every sample."""
    forward_flops: float
    """FLOPs of a forward pass (`slime.data.sharing.flops`). A shared prompt counts once per computation."""
    old_flops: float = 0.0
    """FLOPs of the pass for old log-probs, which may leave out the samples of the first step."""
    ahead_flops: float = 0.0
    """FLOPs of training the layers of multi-token prediction."""
    tower_flops: Mapping[str, float] = field(default_factory=dict)
    """FLOPs of the vision tower per timer (`slime.data.media.tower_work`), which the other fields leave out."""
    logged: list[Logged] = field(default_factory=list)
    learning: dict[str, float] = field(default_factory=dict)
    learning_texts: dict[str, str] = field(default_factory=dict)
    """The texts of `slime.rollout.learning`, which also computes `learning`."""
    sample: ShownSample | None = None
    """The first sample of the rollout."""
    data_bytes: int = 0
    """Bytes of the tensors of `rank_data`, over all ranks."""


@dataclass(frozen=True)
class Evaluated:
    """The result of an evaluation."""

    metrics: dict[str, float]
    """The eval/* metrics; empty if a function of the user has logged the metrics."""
    logged: list[Logged] = field(default_factory=list)
    held_out: dict[str, list[object]] = field(default_factory=dict)
    """Maps a held-out set to a reference to data per data-parallel rank. The trainer computes the loss."""


class RolloutHandle(Protocol):
    """The rollout manager, as the driver sees it."""

    def generate(self, rollout_id: int, saves: bool, version: int) -> Future[RolloutBatch]:
        """Returns the data of rollout `rollout_id`. Its groups may start from now on, and the engines have the weights
        `version`. With `saves`, a checkpoint follows, so the data position is also saved. Calls end in their order."""
        ...

    def evaluate(self, rollout_id: int) -> Future[Evaluated]:
        """Evaluates the current weights, at the same time as rollouts that run ahead."""
        ...

    def progress(self) -> tuple[int, int]:
        """Returns (samples finished, samples wanted) of the current work, without waiting."""
        ...


class TrainerLost(RuntimeError):
    """Raised if a trainer rank died or hangs, or if the ranks lost their connections. The ranks cannot continue, and
    the run may start them again. `cause` is equal for two losses with the same cause."""

    cause = ""


@dataclass(frozen=True)
class RecoveryPoint:
    """A complete checkpoint from which restarted trainer ranks continue."""

    directory: str | None
    """The folder of a checkpoint in host memory, with one folder per role. None for the folders of --save."""
    iteration: int
    """The last rollout that the checkpoint was trained on."""


class TrainerHandle(Protocol):
    """The driver's interface to all trainer ranks. A future and `check` raise TrainerLost if the ranks cannot
    continue."""

    @property
    def start_rollout_id(self) -> int:
        """Returns the first rollout to train: 0, or the rollout after the loaded checkpoint."""
        ...

    def train(self, rollout_id: int, rank_data: list[object]) -> Future[TrainResult]: ...

    def evaluate(self, rollout_id: int, held_out: Mapping[str, list[object]]) -> Future[dict[str, float]]:
        """Computes eval/* metrics of held-out sets with the weights after `rollout_id` rollouts. Changes no state."""
        ...

    def progress(self) -> tuple[int, int]:
        """Returns (micro-batches trained, micro-batches of the rollout) of a rank, without waiting."""
        ...

    def save(self, rollout_id: int) -> Future[None]:
        """Saves a checkpoint. With --async-save, the future is done when the values are copied."""
        ...

    def finish_save(self) -> Future[None]:
        """Returns a future that is done when the files of the last save are complete."""
        ...

    def save_in_memory(self, rollout_id: int) -> Future[None]:
        """Writes the checkpoint of --recover-from memory. The future is done when the values are copied."""
        ...

    def find_states(self, role: str) -> Collection[StoredState]:
        """Returns the complete states of a role in the memory of the hosts that answer."""
        ...

    def check(self) -> None:
        """Raises TrainerLost if a rank has died, or has not answered for --distributed-timeout-minutes."""
        ...

    def end_ranks(self) -> None:
        """Ends the processes of all ranks. Raises RuntimeError if they exist after --rollout-cleanup-timeout."""
        ...

    def restarted(
        self, point: RecoveryPoint | None, check: Callable[[], None]
    ) -> AbstractContextManager[int]:
        """Starts ranks from `point`, or as at the start of the run, and yields the first rollout to train. `end_ranks`
        comes before. `check` is called while the ranks start, and its error ends the wait.

        The block repeats the rollouts that were trained after the point. Engines that start get their weights after
        the block.
        """
        ...


@dataclass(frozen=True)
class TrainResult:
    """The metrics of training on one rollout."""

    steps: list[dict[str, float]]
    """The train/* metrics of each optimizer step."""
    rollout: dict[str, float]
    """The rollout/* metrics, which are means over the data."""
    perf: dict[str, float]
    """The perf/* metrics of rank 0."""
    logged: list[Logged] = field(default_factory=list)


class DataSource(Protocol):
    """The source of prompts, to which unfinished groups return (`--data-source-path`)."""

    def get_samples(self, num_groups: int) -> list[SampleGroup]: ...

    def add_samples(self, groups: list[SampleGroup]) -> None: ...

    def save(self, rollout_id: int) -> None: ...

    def load(self, rollout_id: int) -> None: ...

    def __len__(self) -> int: ...
