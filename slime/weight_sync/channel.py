"""The interface of a weight channel: the trainer's side, the engine worker's side, and the driver's part after a fault.

    trainer rank     WeightChannel.on_trainer(place).parts(...)     makes the parts of one version
    driver           sends `WeightUpdate.message()` of each part to the engines, while the trainer makes the next part
    engine worker    WeightChannel.on_engine(worker).receive(info)  opens a part, whose weights are then loaded

A channel is one class in one file of this folder, and one entry in slime.weight_sync.registry. The engine's side needs
torch only. A rollout backend passes the opened part to the engine's own loader.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from slime.protocols import WeightUpdate
from slime.weight_sync.ranks import is_first
from slime.weight_sync.slices import Slice, whole_slices
from slime.weight_sync.variables import ENGINE_VARIABLE, LOCAL_DIR_VARIABLE, WEIGHT_DIR_VARIABLE

Named = tuple[str, Tensor]


@dataclass(frozen=True)
class Export:
    """The weights that a trainer rank publishes, by HF name. Every call begins with the first one."""

    whole: Callable[[], Iterable[Named]] | None
    """All weights, on all ranks. Collective. None where there is no way to gather them: deltas."""
    own: Callable[[], Iterable[Slice]] | None = None
    """The slices of this rank. All ranks together have each value once. None: rank 0 has all weights."""

    def gathered(self) -> Iterable[Named]:
        """All weights, on all ranks. Collective."""
        assert self.whole is not None, "a channel that gathers weights carries no deltas"
        return self.whole()

    def slices(self) -> Iterable[Slice]:
        """What this rank gives to engines. Collective."""
        if self.own is not None:
            return self.own()
        if is_first():
            return whole_slices(self.gathered())
        for _ in self.gathered():  # the other ranks only take part
            pass
        return ()


Info = Mapping[str, Any]
"""The content of a part's message, from JSON. Each channel has its own keys."""


@dataclass(frozen=True)
class TrainerPlace:
    """A trainer rank."""

    directory: Path
    """All hosts see it."""
    bucket_bytes: int
    """The size of a bucket, unless a tensor is larger."""
    device: torch.device
    timeout_s: float
    """How long the trainer waits until a running engine has taken its bucket."""
    keep_files: bool = False
    """All published versions stay in `directory`."""
    stem: str = "weights"
    """The first part of the names of published files."""


@dataclass(frozen=True)
class Worker:
    """One worker of an engine."""

    device: torch.device
    rank: int
    """Its tensor-parallel rank."""
    engine: str | None
    """The name of its server."""
    weight_dir: str | None
    local_dir: str | None = None
    """Where this host keeps its copy of the weights (--update-weight-mode delta)."""

    @classmethod
    def here(cls, device: torch.device, rank: int) -> Worker:
        """The worker in this process, whose server has set the environment."""
        given = (ENGINE_VARIABLE, WEIGHT_DIR_VARIABLE, LOCAL_DIR_VARIABLE)
        return cls(device, rank, *map(os.environ.get, given))


def _nothing() -> None: ...


@dataclass(frozen=True)
class Part:
    """A part of the weights that a worker has received."""

    shapes: dict[str, list[int]]
    get: Callable[[str], Tensor]
    """Returns a tensor of `shapes` by its HF name."""
    load: bool
    """The worker loads the part."""
    compare: bool
    """After loading, the worker compares its live weights with the part (--check-weight-update-equal)."""
    whole: bool
    """The part holds all weights, and the worker checks their names before it loads any. Otherwise the names are
    checked when the update ends."""
    path: str | None = None
    """The part's file."""
    origin: str = "the trainer's"
    """Names the tensors in an error."""
    series: str | None = None
    """A new one means that the update starts again with all weights."""
    borrowed: bool = True
    """The memory belongs to the sender, so the worker must have read it before it answers."""
    verify: Callable[[], None] = _nothing
    """Raises ValueError unless the trainer made these tensors."""


class Receiver(Protocol):
    """The engine worker's side of a channel. One object serves all updates of a worker."""

    def receive(self, info: Info) -> AbstractContextManager[Part | None]:
        """Open one part. None means that the update starts again and that this part will be sent once more. ValueError
        for a message that this worker cannot read."""
        ...


class WeightChannel(ABC):
    """One way for weights to reach engines; an instance is the trainer's side."""

    name: ClassVar[str]
    """Its name in the registry."""

    @classmethod
    @abstractmethod
    def on_trainer(cls, place: TrainerPlace) -> WeightChannel:
        """The side of one trainer rank."""

    @abstractmethod
    def parts(
        self, export: Export, version: int, *, compare: bool, receivers: dict[str, int]
    ) -> Iterator[WeightUpdate]:
        """The parts of `version`. Part i is valid until part i + 2 is requested.

        Collective over trainer ranks. The engines get the parts of rank 0. `compare`: the parts also have the data for
        --check-weight-update-equal. `receivers`: name of an engine -> number of its workers.
        """

    @classmethod
    @abstractmethod
    def on_engine(cls, worker: Worker) -> Receiver:
        """The side of one engine worker."""

    @staticmethod  # noqa: B027 (in most channels nothing waits)
    def give_up(info: Info) -> None:
        """The driver calls this if an engine or the trainer fails during the part. It releases all that wait for it."""

    @staticmethod
    def is_given_up(info: Info) -> bool:
        """Whether one of the sides has reported that it could not finish the part."""
        return False
