"""Tests `vime replay` on whole runs with an engine: a second computation of each step has the same bits."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from train_fixtures import World, make_world, run, vime

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module", params=[None, "qwen3-moe-tiny"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    yield from make_world(arch=request.param)


def test_all_steps_of_a_run_are_equal(world: World) -> None:
    """The dense model trains 20 rollouts on one rank. The model with experts trains 3 rollouts on two ranks, with the
    engine's routes."""
    dense = (world.root / "tiny").is_dir()
    rollouts, ranks = (20, 1) if dense else (3, 2)
    flags = () if dense else ("--use-rollout-routing-replay",)
    train = world.grpo("run", rollouts=rollouts)
    placed = ("--colocate", "--actor-num-gpus-per-node", str(ranks), "--receipt", *flags)
    run(vime("train", *train, *placed), world.root / "train.out")
    folder = world.root / "run"
    output = run(vime("replay", str(folder), "--step", "all"), world.root / "replay.out")
    assert f"0 differing bits: {rollouts} of {rollouts} steps" in output, output
    assert f"{ranks} rank(s)" in output
    verified = run(vime("replay", str(folder), "--verify"), world.root / "verify.out")
    assert f"whole: {(rollouts + 1) * ranks} records of {ranks} rank(s), {rollouts} steps" in verified, (
        verified
    )
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len([row for row in metrics if row.get("perf/receipt_time", 0) > 0]) == rollouts
