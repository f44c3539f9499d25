"""The interface of a weight channel: the trainer's side, the engine worker's side, and the driver's part after a fault.

    trainer rank     WeightChannel.on_trainer(place).parts(...)     makes the parts of a version
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
    """The weights that a trainer rank publishes, by HF name. Every call starts again at the first weight."""

    whole: Callable[[], Iterable[Named]] | None
    """Yields all weights, on all ranks. Collective. None for deltas, which cannot be gathered."""
    own: Callable[[], Iterable[Slice]] | None = None
    """Yields the slices of this rank. All ranks together have each value once. None means that rank 0 has all
    weights."""

    def gathered(self) -> Iterable[Named]:
        """Returns all weights, on all ranks. Collective."""
        assert self.whole is not None, "a channel that gathers weights carries no deltas"
        return self.whole()

    def slices(self) -> Iterable[Slice]:
        """Returns the slices that this rank sends to engines. Collective."""
        if self.own is not None:
            return self.own()
        if is_first():
            return whole_slices(self.gathered())
        for _ in self.gathered():  # the other ranks only take part in the collectives
            pass
        return ()


Info = Mapping[str, Any]
"""The content of a part's message, from JSON. Each channel has its own keys."""


@dataclass(frozen=True)
class TrainerSettings:
    """The surroundings of a trainer rank."""

    directory: Path
    """Directory that all hosts see."""
    bucket_bytes: int
    """Bytes of a bucket, unless a tensor is larger."""
    device: torch.device
    timeout_s: float
    """Seconds that the trainer waits until a running engine has received its bucket."""
    keep_files: bool = False
    """All published versions stay in `directory`."""
    stem: str = "weights"
    """First part of the names of published files."""


@dataclass(frozen=True)
class Worker:
    """A worker of an engine, with its settings for weight updates."""

    device: torch.device
    rank: int
    """Tensor-parallel rank of the worker."""
    engine: str | None
    """Name of the worker's server."""
    weight_dir: str | None
    local_dir: str | None = None
    """Directory of this host's copy of the weights (--update-weight-mode delta)."""

    @classmethod
    def here(cls, device: torch.device, rank: int) -> Worker:
        """Returns the worker in this process, whose server has set the environment."""
        variables = (ENGINE_VARIABLE, WEIGHT_DIR_VARIABLE, LOCAL_DIR_VARIABLE)
        return cls(device, rank, *map(os.environ.get, variables))


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
    """Path of the part's file."""
    origin: str = "the trainer's"
    """Description of the tensors in an error."""
    series: str | None = None
    """Id of the series. A new id means that the update starts again with all weights."""
    borrowed: bool = True
    """The memory belongs to the sender, so the worker must have read it before it answers."""
    verify: Callable[[], None] = _nothing
    """Raises ValueError unless the trainer made these tensors."""
    view: Callable[[str], Tensor] | None = None
    """Returns a tensor in the sender's memory, if `get` copies it. The sender may write to this memory after the worker
    has answered."""

    def read(self, name: str) -> Tensor:
        """Returns a tensor without a copy if possible. The worker must not use it after it has answered."""
        return (self.view or self.get)(name)


class Receiver(Protocol):
    """The engine worker's side of a channel. One object serves all updates of a worker."""

    def receive(self, info: Info) -> AbstractContextManager[Part | None]:
        """Opens a part. None means that the update starts again and that this part will be sent once more. Raises
        ValueError for a message that this worker cannot read."""
        ...


class WeightChannel(ABC):
    """A way for weights to reach engines. An instance is the trainer's side."""

    name: ClassVar[str]
    """Name of the channel in the registry."""

    @classmethod
    @abstractmethod
    def on_trainer(cls, settings: TrainerSettings) -> WeightChannel:
        """Returns the channel of a trainer rank."""

    @abstractmethod
    def parts(
        self, export: Export, version: int, *, compare: bool, receivers: dict[str, int]
    ) -> Iterator[WeightUpdate]:
        """Yields the parts of `version`. Part i is valid until part i + 2 is requested.

        Collective over trainer ranks. The engines get the parts of rank 0. `compare` means that the parts also have the
        data for --check-weight-update-equal. `receivers` maps an engine's name to the number of its workers.
        """

    @classmethod
    @abstractmethod
    def on_engine(cls, worker: Worker) -> Receiver:
        """Returns the receiver of an engine worker."""

    @staticmethod  # noqa: B027 (in most channels nothing waits)
    def give_up(info: Info) -> None:
        """Releases every process that waits for the part. The driver calls this function if an engine or the trainer
        fails during the part."""

    @staticmethod
    def is_abandoned(info: Info) -> bool:
        """Returns whether a process has reported that it could not finish the part."""
        return False
