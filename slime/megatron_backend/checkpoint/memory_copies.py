"""Copies of the states of --recover-from memory on another node, so that a lost node loses no state.

    rank on node 0 --> copy on node 1,  rank on node 1 --> copy on node 0

A thread sends the newest slot over gloo while the next step runs. A rank that starts on a node without its state gets
the state from a node that has it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

from slime.checkpoints.memory_files import StoredState, find_states
from slime.megatron_backend.checkpoint.background import BackgroundSaves

T = TypeVar("T")
_PART_BYTES = 2**26
"""Bytes of a message."""


class OpenSlot(Protocol):
    """Returns the bytes of the slot of a rank in this node's folder, with `size` bytes."""

    def __call__(self, rank: int, slot: int, size: int) -> Tensor: ...


class MemoryCopies:
    """The copies that this rank sends and stores. `folder` has another name on each node. `size`: bytes of this rank's
    slots. The constructor is collective. On one node, no copies are made."""

    def __init__(self, folder: Path, size: int, open_slot: OpenSlot, timeout_minutes: float) -> None:
        self._folder, self._open, self._rank = folder, open_slot, dist.get_rank()
        nodes, self._sizes = zip(*_gather((str(folder), size), None), strict=True)
        self._holders = choose_holders(nodes)
        self._saves = BackgroundSaves(timeout_minutes) if self._holders else None

    def start(self, state: StoredState, content: Tensor) -> None:
        """Sends a complete state of this rank to its holder in the background, and stores the states of other ranks.
        Call `wait` before the next change of the slot."""
        if (saves := self._saves) is not None:
            saves.start(lambda: self._exchange(saves.group, state, content))

    def wait(self) -> None:
        """Returns when the last copies are complete. Raises the error of a copy."""
        if self._saves is not None:
            self._saves.wait()

    def close(self) -> None:
        if self._saves is not None:
            self._saves.close()

    def _exchange(self, group: dist.ProcessGroup, state: StoredState, content: Tensor) -> None:
        record = state.record_path(self._folder).read_bytes()
        states = _gather((state, record), group)
        sources = [rank for rank, holder in self._holders.items() if holder == self._rank]
        copies = {rank: self._open(rank, states[rank][0].slot, self._sizes[rank]) for rank in sources}
        for rank in sources:
            drop_records(self._folder, rank, states[rank][0].slot)
        incoming = {rank: copy.split(_PART_BYTES) for rank, copy in copies.items()}
        outgoing = content.split(_PART_BYTES)
        for number in range(max(len(outgoing), *(len(parts) for parts in incoming.values()), 0)):
            works = []
            if number < len(outgoing):
                works.append(dist.isend(outgoing[number], self._holders[self._rank], group=group))
            for rank, parts in incoming.items():
                if number < len(parts):
                    works.append(dist.irecv(parts[number], rank, group=group))
            for work in works:
                assert work is not None
                work.wait()
        for rank in sources:
            _write(states[rank][0].record_path(self._folder), states[rank][1])

    def fetch(self, iteration: int) -> None:
        """Gets this rank's state of `iteration` if its node does not have it. Collective."""
        if self._saves is None:
            return
        group = self._saves.group
        held = _gather([one for one in find_states(self._folder) if one.iteration == iteration], group)
        for rank, here in enumerate(held):
            if any(one.rank == rank for one in here):
                continue
            holder, state = next(
                (number, one) for number, states in enumerate(held) for one in states if one.rank == rank
            )
            path = state.record_path(self._folder)
            records = [path.read_bytes() if self._rank == holder else b""]
            dist.broadcast_object_list(records, holder, group=group)
            if self._rank not in (rank, holder):
                continue
            for part in self._open(rank, state.slot, self._sizes[rank]).split(_PART_BYTES):
                if self._rank == rank:
                    dist.recv(part, holder, group=group)
                else:
                    dist.send(part, rank, group=group)
            if self._rank == rank:
                _write(path, records[0])


def choose_holders(nodes: Sequence[str]) -> dict[int, int]:
    """Returns, for the rank of each entry of `nodes`, a rank on the next node. The result is empty for one node."""
    names = sorted(set(nodes))
    if len(names) == 1:
        return {}
    ranks = {name: [rank for rank, node in enumerate(nodes) if node == name] for name in names}
    found = {}
    for name, following in zip(names, [*names[1:], names[0]], strict=True):
        for number, rank in enumerate(ranks[name]):
            found[rank] = ranks[following][number % len(ranks[following])]
    return found


def drop_records(folder: Path, rank: int, slot: int) -> None:
    """Makes a slot incomplete."""
    for one in find_states(folder):
        if (one.rank, one.slot) == (rank, slot):
            with contextlib.suppress(FileNotFoundError):
                one.record_path(folder).unlink()


def _write(path: Path, content: bytes) -> None:
    staged = path.with_name(f".{path.name}")
    staged.write_bytes(content)
    os.replace(staged, path)


def _gather(mine: T, group: dist.ProcessGroup | None) -> list[T]:
    found: list[T] = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine, group=group)
    return found
