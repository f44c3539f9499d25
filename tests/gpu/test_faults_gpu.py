"""Tests the faults of tests/e2e/runs/faults/test_faults.py in runs on GPUs: weights through CUDA IPC, engines that
sleep, collectives of NCCL. A run needs about a minute to start, so each run has several faults.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fault_cases import (
    FaultyRun,
    engines_killed,
    rank_killed,
    resumed_with_a_slow_engine_then_interrupted,
    trainer_killed,
)
from train_fixtures import World, make_world


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world("cuda")


@pytest.mark.gpu
def test_killed_engines_are_replaced(world: World) -> None:
    engines_killed(FaultyRun(world, "engines"))


@pytest.mark.gpu
def test_a_run_whose_trainer_was_killed_is_resumed(world: World) -> None:
    run = FaultyRun(world, "trainer")
    trainer_killed(run)
    resumed_with_a_slow_engine_then_interrupted(run)


@pytest.mark.multi_gpu
def test_trainer_rank_that_dies_is_named_though_its_peers_wait_for_it(world: World) -> None:
    rank_killed(world, "dead", ranks=2)
