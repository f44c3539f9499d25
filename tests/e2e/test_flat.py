"""A long run holds no more threads, files and memory at its end than at its start, whatever happened in between."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import psutil
import pytest
from train_fixtures import Launch, World, launched, make_world, rows, vime

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STEPS = 200
PROCESSES = {"driver": r"-m vime train ", "trainer": "^ray::TrainerActor", "manager": "^ray::RolloutActor"}
SERVER = r"^\S+ -m vime\.engine\.serve vllm\.entrypoints"
WARM = 20
"""Steps after which each thread pool is full and each part has had its first evaluation and checkpoint."""
MORE = {"threads": 4, "files": 4, "rss_mib": 48}
"""What a process may have more of 80 steps later. A leak of one thread or file per step, or per two, is above it."""

Held = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


def held(launch: Launch) -> Held:
    """Threads, open files and memory of each process of the run that lives as long as the run."""
    found = {}
    for name, pattern in PROCESSES.items():
        process = psutil.Process(launch.process.pid if name == "driver" else launch.find(pattern)[-1])
        found[name] = {
            "threads": process.num_threads(),
            "files": process.num_fds(),
            "rss_mib": process.memory_info().rss >> 20,
        }
    return found


def test_flat_over_steps_with_lost_engines_evaluations_and_a_resume(world: World) -> None:
    """Half of the steps, Ctrl-C, and the other half from the checkpoint. Each half evaluates and saves every ten steps
    and loses its engine once."""
    run_dir, checkpoint = world.root / "flat", str(world.root / "flat" / "checkpoint")
    flags = [
        *world.grpo("flat", rollouts=STEPS + 100),
        *("--colocate", "--actor-num-gpus-per-node", "1"),
        *("--eval-config", str(world.eval_config), "--eval-interval", "10"),
        *("--save", checkpoint, "--load", checkpoint, "--save-interval", "10"),
    ]

    def reach(launch: Launch, step: int) -> Held:
        launch.wait_for(lambda: step in rows(run_dir, "train/step"), f"step {step}", 1200)
        return held(launch)

    for half in range(2):
        first = half * STEPS // 2
        with launched(vime("train", *flags), world.root / f"flat-{half}.out") as launch:
            before = reach(launch, first + WARM)
            (engine,) = launch.find(SERVER)
            os.kill(engine, signal.SIGKILL)
            launch.wait_for(lambda: launch.output.count("serves again") == 1, "a new engine", 360)
            replaced = reach(launch, max(rows(run_dir, "train/step")) + 5)
            after = reach(launch, first + STEPS // 2)
            os.killpg(launch.process.pid, signal.SIGINT)
            assert launch.finish(60) == 130, launch.output[-3000:]
        print(json.dumps({"half": half, "before": before, "replaced": replaced, "after": after}))
        for name, values in after.items():
            for what, count in values.items():
                assert count <= before[name][what] + MORE[what], (half, name, what, before, replaced, after)
    steps = rows(run_dir, "train/step")
    assert sorted(steps) == list(range(max(steps) + 1)) and max(steps) >= STEPS
    assert set(range(0, STEPS, 10)) <= set(rows(run_dir, "eval/step"))
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-5 for row in steps.values())
