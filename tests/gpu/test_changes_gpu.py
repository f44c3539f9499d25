"""Tests engines that change during a run on two GPUs, and an engine with the adapters of two runs.

The trainer has the first GPU. An engine of the run and an engine of `vime serve` share the second GPU.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_cases import ChangingRun, engines, train_two_adapters, with_key
from train_fixtures import World, launched, make_world, vime

pytestmark = pytest.mark.multi_gpu


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world("cuda")


def test_two_runs_train_adapters_of_one_engine_at_once(world: World, tmp_path: Path) -> None:
    train_two_adapters(world, tmp_path)


def test_engines_join_and_leave_a_run(world: World) -> None:
    """While the engine of `vime serve` answers, the first engine leaves, and another engine joins on its GPU."""
    run = ChangingRun(world, "disk")
    run_dir = str(run.run_dir)
    with launched(with_key(vime("train", *run.flags)), run.run_dir.with_suffix(".out")) as launch:
        launch.wait_for(lambda: run.steps() >= 1, "the second step", 280)
        with run.joined(world.root):
            run.answer(launch, "engine-0", "engine-1")
            assert "its devices are free" in engines("remove", run_dir, "engine-0")
            run.go_on(launch)
            engines("add", run_dir)
            run.answer(launch, "engine-1", "engine-2")
        run.go_on(launch)
        launch.process.send_signal(signal.SIGTERM)
        assert launch.finish(120) == 128 + signal.SIGTERM
        assert "died" not in launch.output and "Traceback" not in launch.output, launch.output[-3000:]
    run.assert_right_weights()
