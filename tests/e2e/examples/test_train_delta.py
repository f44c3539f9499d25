"""Whole runs that send deltas train like runs that send all weights, to the last digit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from train_fixtures import World, launched, make_world, rows, run, vime

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

HERE = Path(__file__).resolve().parent.parent
APART = ("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", "--check-weight-update-equal")
DELTA = ("--update-weight-mode", "delta")
STEPS = 3


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


def trained(world: World, name: str) -> list[dict[str, float]]:
    """Returns the metrics of a run without times."""
    both = (rows(world.root / name, key) for key in ("train/step", "rollout/step"))
    return [
        {k: v for k, v in row.items() if k != "time" and not k.startswith(("perf/", "rl_kernel/"))}
        for found in both
        for row in found.values()
    ]


def sent(world: World, name: str, what: str) -> list[float]:
    found = rows(world.root / name, "rollout/step")
    return [found[step][f"perf/update_weights_{what}"] for step in range(STEPS)]


@pytest.fixture(scope="module")
def full(world: World) -> list[dict[str, float]]:
    run(vime("train", *world.grpo("full", rollouts=STEPS), *APART), world.root / "full.out")
    assert sent(world, "full", "density") == [1.0] * STEPS
    return trained(world, "full")


@pytest.mark.parametrize("transport", ["disk", "nccl"])
def test_a_run_with_deltas_is_the_same(world: World, full: list[dict[str, float]], transport: str) -> None:
    buffer = ("--update-weight-buffer-size", "20000")  # an update has several parts
    flags = [*world.grpo(transport, rollouts=STEPS), *APART, *DELTA, *buffer]
    said = run(vime("train", *flags, "--update-weight-transport", transport), world.root / f"{transport}.out")
    assert "in place of a delta" not in said
    assert trained(world, transport) == full
    for density in sent(world, transport, "density"):
        assert 0 < density <= 1
    assert sent(world, transport, "wire_bytes") != sent(world, "full", "wire_bytes")


@pytest.mark.parametrize("transport", ["disk", "nccl"])
def test_two_ranks_send_deltas_of_their_own_slices(
    world: World, full: list[dict[str, float]], transport: str
) -> None:
    """The ranks are tensor parallel, and engines compare each live tensor. Two ranks sum in another order than one
    rank."""
    name = f"tp-{transport}"
    flags = [*world.grpo(name, rollouts=STEPS), *APART, *DELTA, "--update-weight-transport", transport]
    flags += ["--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    said = run(vime("train", *flags), world.root / f"{name}.out")
    assert "in place of a delta" not in said
    for key in ("train/loss", "train/grad_norm"):
        assert trained(world, name)[0][key] == pytest.approx(full[0][key], rel=1e-4, abs=1e-6)
    found = sent(world, name, "density")
    assert found[0] == 1.0 and all(0 < density <= 1 for density in found[1:])
    moved = sent(world, name, "wire_bytes")
    assert all(0 < bytes_ != moved[0] for bytes_ in moved[1:])


def test_an_engine_killed_in_a_delta_comes_back_with_the_same_weights(
    world: World, full: list[dict[str, float]]
) -> None:
    """The engine dies right before it gets the delta of the second update. Its successor loads a file of that
    version, and then accepts deltas."""
    flags = [*world.grpo("killed", rollouts=STEPS), *APART, *DELTA, "--update-weight-transport", "disk"]
    deadly = [sys.executable, str(HERE / "deadly_update.py"), "1", *flags]
    with launched(deadly, world.root / "killed.out") as launch:
        assert launch.finish(240) == 0, launch.output[-3000:]
        assert "deadly_update: SIGKILL" in launch.output
        assert "serves again" in launch.output and "in place of a delta" not in launch.output
    found = rows(world.root / "killed", "train/step")
    assert sorted(found) == list(range(STEPS))
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-5 for row in found.values())
    assert sent(world, "killed", "density")[1:] != [1.0] * (STEPS - 1)


def test_a_copy_that_was_changed_gets_the_whole_set(world: World, full: list[dict[str, float]]) -> None:
    """The next delta does not fit the copy, the driver reports it, and training continues unchanged."""
    local = world.root / "local"
    flags = [*world.grpo("changed", rollouts=STEPS), *APART, *DELTA, "--update-weight-transport", "disk"]
    flags += ["--update-weight-local-checkpoint-dir", str(local)]
    copy = local / "model.safetensors"
    with launched(vime("train", *flags), world.root / "changed.out") as launch:
        launch.wait_for((local / "state.json").exists, "the copy of version 0", 120)
        with copy.open("r+b") as file:
            file.seek(-1, 2)
            last = file.read(1)
            file.seek(-1, 2)
            file.write(bytes([last[0] ^ 1]))
        assert launch.finish(240) == 0, launch.output[-3000:]
        assert (
            "the whole set of weights is sent instead of a delta: engine engine-0-1: a delta to version 1"
            in (launch.output)
        )
    assert trained(world, "changed") == full
    assert sent(world, "changed", "density")[0] == 1.0 > sent(world, "changed", "density")[1]
