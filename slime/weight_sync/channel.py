"""What a weight channel implements: the trainer's side, the engine worker's side, and the driver's duty when one fails.

    trainer rank     WeightChannel.on_trainer(place).parts(...)     makes the parts of one version
    driver           sends `WeightUpdate.message()` of each part to the engines, while the trainer makes the next one
    engine worker    WeightChannel.on_engine(worker).receive(info)   opens a part; its weights are then loaded

A channel is one class in one file of this folder, and one entry in slime.weight_sync.registry. The engine's side needs
torch alone: a rollout backend passes what it opens to the engine's own loader.
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
from slime.weight_sync.variables import ENGINE_VARIABLE, WEIGHT_DIR_VARIABLE

Export = Callable[[], Iterable[tuple[str, Tensor]]]
"""All weights by HF name; each call starts from the first one. Collective over trainer ranks."""
Info = Mapping[str, Any]
"""What a part's message says, as JSON brings it. Each channel knows its own keys."""


@dataclass(frozen=True)
class TrainerPlace:
    """A trainer rank. `directory` is seen by all hosts. A bucket has `bucket_bytes`, or the size of the largest tensor.
    `timeout_s`: how long the trainer waits for an engine that runs and does not take its bucket."""

    directory: Path
    bucket_bytes: int
    device: torch.device
    timeout_s: float


@dataclass(frozen=True)
class Worker:
    """One worker of an engine. `rank`: its tensor-parallel rank. `engine`: the name of its server."""

    device: torch.device
    rank: int
    engine: str | None
    weight_dir: str | None

    @classmethod
    def here(cls, device: torch.device, rank: int) -> Worker:
        """The worker in this process, whose server has set the environment."""
        return cls(device, rank, os.environ.get(ENGINE_VARIABLE), os.environ.get(WEIGHT_DIR_VARIABLE))


def _nothing() -> None: ...


@dataclass(frozen=True)
class Part:
    """A part of the weights that a worker has received. `get` gives a tensor of `shapes` by its HF name.

    `load`: the worker loads it. `compare`: the worker compares its live weights with it, after loading
    (--check-weight-update-equal). `whole`: these are all weights, checked before any of them is loaded; other parts are
    checked when the update ends. `origin` names the part's tensors in an error. `series`: parts of another series than
    before bring all weights anew. `lent`: the part is not the worker's own: it must have been read when the worker
    answers. `verify`: ValueError unless the trainer made these tensors.
    """

    shapes: dict[str, list[int]]
    get: Callable[[str], Tensor]
    load: bool
    compare: bool
    whole: bool
    origin: str = "the trainer's"
    series: str | None = None
    lent: bool = True
    verify: Callable[[], None] = _nothing


class Receiver(Protocol):
    """The engine worker's side of a channel. One object serves all updates of a worker."""

    def receive(self, info: Info) -> AbstractContextManager[Part | None]:
        """Open one part. None: the update begins again, and this part is sent once more. ValueError for a message that
        this worker cannot take."""
        ...


class WeightChannel(ABC):
    """One way for weights to reach engines; an instance is the trainer's side."""

    name: ClassVar[str]
    """Its name in the registry."""
    together: ClassVar[bool] = False
    """Whether all engines take a part at the same time: if one dies, the update begins again for the others."""

    @classmethod
    @abstractmethod
    def on_trainer(cls, place: TrainerPlace) -> WeightChannel:
        """The side of one trainer rank."""

    @abstractmethod
    def parts(
        self, export: Export, version: int, *, compare: bool, receivers: dict[str, int]
    ) -> Iterator[WeightUpdate]:
        """The parts of `version`. Each is valid until the part after the next one is asked for.

        Collective over trainer ranks; engines get those of rank 0. `compare`: engines also get what they need to
        compare their weights (--check-weight-update-equal). `receivers`: the workers of each engine, by its name.
        """

    @classmethod
    @abstractmethod
    def on_engine(cls, worker: Worker) -> Receiver:
        """The side of one engine worker."""

    @staticmethod  # noqa: B027 (in most channels nothing waits)
    def give_up(info: Info) -> None:
        """The driver's duty when an engine or the trainer fails during the part: release whoever waits for it."""

    @staticmethod
    def is_given_up(info: Info) -> bool:
        """Whether some side could not finish the part and has said so."""
        return False
