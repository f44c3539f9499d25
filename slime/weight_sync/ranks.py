"""Communication between trainer ranks while they publish weights. A process without torch.distributed is the only
rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def count() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def own_rank() -> int:
    """Returns the rank of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_first() -> bool:
    return own_rank() == 0


def everywhere(mine: T) -> list[T]:
    """Returns all ranks' objects, in rank order, on every rank. Collective."""
    of_ranks: list[T] = [mine] * count()
    if len(of_ranks) > 1:
        dist.all_gather_object(of_ranks, mine)
    return of_ranks


@contextmanager
def on_all_ranks(what: str) -> Iterator[None]:
    """Runs a block on all ranks. If the block fails on some ranks, these raise their errors, and the other ranks raise
    an error that names the first failed rank. Collective: no rank leaves the block before the last rank has finished
    it."""
    error: Exception | None = None
    try:
        yield
    except Exception as found:  # raised again below, after the other ranks have received it
        error = found
    outcomes = everywhere(None if error is None else (isinstance(error, ValueError), str(error)))
    if error is not None:
        raise error
    for rank, outcome in enumerate(outcomes):
        if outcome is not None:
            kind = ValueError if outcome[0] else RuntimeError
            raise kind(
                f"all trainer ranks must {what}, got '{outcome[1]}' on rank {rank}; see the log of trainer-{rank}"
            )
