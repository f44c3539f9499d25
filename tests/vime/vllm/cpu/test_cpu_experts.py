"""Tests experts of engines on CPUs, in plain PyTorch. Real engines: tests/e2e/engines/test_engine_spread_experts.py,
and MiniMax-M2 in tests/e2e/engines/test_engine_families.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from vime.vllm.cpu.experts import all_gatherv, local_choice, reduce_scatterv


def test_a_rank_computes_its_own_experts_only() -> None:
    """Experts 1 and 3 are this rank's 0 and 1. The other experts have no weight."""
    weights, ids = torch.tensor([[0.7, 0.3], [0.6, 0.4]]), torch.tensor([[3, 0], [2, 1]], dtype=torch.int32)
    mine, local = local_choice(torch.tensor([-1, 0, -1, 1], dtype=torch.int32), weights, ids)
    torch.testing.assert_close(mine, torch.tensor([[0.7, 0.0], [0.0, 0.4]]), rtol=0, atol=0)
    assert local.tolist() == [[1, 0], [0, 0]] and local.dtype == torch.int32


def of_ranks(call: Callable[[Any, int], Any], ranks: int) -> list[Any]:
    """Runs `call(communicator, rank)` in a thread per rank. Their communicators sum over the threads."""
    meet, given, results = threading.Barrier(ranks), [torch.empty(0)] * ranks, [None] * ranks

    def work(rank: int) -> None:
        def all_reduce(x: Tensor) -> Tensor:
            given[rank] = x.clone()
            meet.wait(10)
            total = torch.stack(given).sum(0).to(x.dtype)
            meet.wait(10)
            return x.copy_(total)

        results[rank] = call(
            SimpleNamespace(world_size=ranks, rank_in_group=rank, all_reduce=all_reduce), rank
        )

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def test_replicas_exchange_rows_of_different_numbers() -> None:
    sizes, rows = [2, 0, 3], torch.arange(10.0).view(5, 2)
    parts = rows.split(sizes)
    gathered = of_ranks(lambda c, rank: all_gatherv(c, [parts[rank], parts[rank].int()], 0, sizes), 3)
    for floats, ints in gathered:
        assert torch.equal(floats, rows) and torch.equal(ints, rows.int())
    summed = of_ranks(lambda c, rank: reduce_scatterv(c, rows * (rank + 1), 0, sizes), 3)
    assert [part.tolist() for part in summed] == [(6 * part).tolist() for part in parts]
    even = of_ranks(lambda c, rank: all_gatherv(c, rows[rank : rank + 1]), 2)
    assert all(torch.equal(found, rows[:2]) for found in even)
    halves = of_ranks(lambda c, rank: reduce_scatterv(c, rows[:4], 0), 2)
    assert torch.equal(torch.cat(halves), 2 * rows[:4])
