"""Tests the faults of tests/e2e/runs/faults/test_faults.py in runs on GPUs: weights through CUDA IPC, engines that
sleep, collectives of NCCL. A run needs about a minute to start, so each run has several faults.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from deadly_hooks import order
from fault_cases import (
    KINDS,
    FaultyRun,
    engines_killed,
    rank_killed,
    resumed_with_a_slow_engine_then_interrupted,
    trainer_killed,
)
from train_fixtures import World, launched, make_world, rows, vime

from slime.tracking.journal import read_events
from slime.tracking.ledger import read_ledger


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


@pytest.mark.gpu
def test_an_engine_starts_in_a_process_that_waits(world: World) -> None:
    """A second process waits only after the first has become an engine."""
    run = FaultyRun(world, "standby")
    run.flags += ["--engine-standby-s", "1"]
    engines_killed(run)
    log = (run.run_dir / "logs" / "engine-standby.log").read_text()
    assert log.count("the imports are done") >= 2


@pytest.mark.multi_gpu
def test_trainer_rank_that_dies_is_named_though_its_peers_wait_for_it(world: World) -> None:
    rank_killed(world, "dead", ranks=2)


@pytest.mark.multi_gpu
def test_killed_rank_continues_from_memory(world: World) -> None:
    """Weights go over NCCL to an engine that goes on, and the states of bfloat16 weights come from /dev/shm."""
    run_dir = world.root / "memory"
    flags = [*world.grpo("memory", rollouts=4), "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1"]
    flags += [*KINDS["cuda"].flags, "--rollout-data-postprocess-path", "deadly_hooks.in_step"]
    order(run_dir, "step-2")
    with launched(vime("train", *flags, "--recover-from", "memory"), world.root / "memory.out") as launch:
        assert launch.finish(500) == 0, launch.output[-3000:]
    (back,) = read_events(run_dir, ("trainer_restarted",))
    assert (back["rollout"], back["repeated"]) == (2, 0) and back["seconds"] < 30
    assert sorted(rows(run_dir, "train/step")) == list(range(4)) and read_ledger(run_dir).is_exact
