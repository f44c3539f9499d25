"""Tests the audit of real runs: strict mode passes over two rollouts of a real engine, and `vime audit` splits the
difference."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from train_fixtures import PROMPTS, SAMPLES, World, make_world, rows, run, samples, vime

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
LR = ("--lr", "1e-3")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


@pytest.fixture(scope="module")
def trained(world) -> Path:
    argv = [*world.grpo("strict", rollouts=2), "--colocate", "--actor-num-gpus-per-node", "1"]
    argv += ["--rlk-consistency", "strict", "--save", str(world.root / "save"), "--save-interval", "1"]
    argv += ["--save-hf", str(world.root / "hf-{rollout_id}")]
    run(vime("train", *argv), world.root / "train.out")
    return world.root / "strict"


def test_every_token_of_a_run_is_compared(trained):
    for rollout, row in rows(trained, "rollout/step").items():
        tokens = sum(s["response_length"] for s in samples(trained, rollout))
        assert row["consistency/tokens"] == tokens >= PROMPTS * SAMPLES
        assert row["consistency/not_comparable_tokens"] == 0
        assert 0 < row["consistency/abs_dlogp_max"] < 1e-4 and row["consistency/clip_fraction"] == 0
        assert row["perf/consistency_time"] < 0.1 * row["perf/step_time"], (
            "32 samples only; bench for the share"
        )
    lines = [json.loads(line) for line in (trained / "audit.jsonl").read_text().splitlines()]
    assert [line["rollout_id"] for line in lines] == [0, 1]
    worst = lines[1]["worst"]
    sample = next(s for s in samples(trained, 1) if s["index"] == worst["sample"])
    assert sample["rollout_log_probs"][worst["position"]] == worst["rollout"]
    assert sample["tokens"][worst["position"] - sample["response_length"]] == worst["token_id"]


SPLIT = {
    "pipeline": ("--pipeline-model-parallel-size", "2", "--update-weight-transport", "nccl"),
    "context": ("--context-parallel-size", "2"),
}


@pytest.mark.parametrize("kind", SPLIT)
def test_two_ranks_agree_with_the_engine(world, kind):
    """Each rank has half of the layers or half of every sequence, with one engine. Rollout 1 is drawn from the
    weights that both ranks trained and exported: broadcast in ten buckets (by gloo here), or written as a file."""
    argv = [*world.grpo(kind, rollouts=2), "--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "1"]
    argv += [*SPLIT[kind], "--update-weight-buffer-size", "500000"]
    argv += ["--rlk-consistency", "strict", "--check-weight-update-equal"]
    run(vime("train", *argv), world.root / f"{kind}.out")
    for rollout, row in rows(world.root / kind, "rollout/step").items():
        tokens = sum(s["response_length"] for s in samples(world.root / kind, rollout))
        assert row["consistency/tokens"] == tokens and row["consistency/not_comparable_tokens"] == 0
        assert 0 < row["consistency/abs_dlogp_max"] < 1e-4
        assert ("perf/pipeline_wait_time" in row) == (kind == "pipeline")
        assert row["rl_kernel/linear_token_loss/calls"] > 0


def audit(trained: Path, *argv: str) -> dict[tuple[str, str], dict[str, float]]:
    rollout = argv[argv.index("--rollout") + 1]
    done = subprocess.run(vime("audit", str(trained), *argv), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads((trained / "audit" / f"rollout_{rollout}.json").read_text())
    assert (trained / "audit" / f"rollout_{rollout}.png").stat().st_size > 10_000
    for pair in record["pairs"]:
        assert f"{pair['first']} - {pair['second']}" in done.stdout
    return {(pair["first"], pair["second"]): pair for pair in record["pairs"]}


def test_the_command_splits_the_difference(trained):
    """Rollout 1 was drawn from weights version 1, which --save-hf wrote after rollout 0."""
    pairs = audit(trained, "--rollout", "1")
    assert len(pairs) == 8
    assert all(pair["max"] < 1e-4 for pair in pairs.values())
    assert pairs["trainer, training rows", "engine decode"]["tokens"] == sum(
        s["response_length"] for s in samples(trained, 1)
    )


def test_the_part_that_differs_is_named(trained, world):
    """With the weights of version 0, the saved decode comes from another model; trainer and engine still agree."""
    pairs = audit(trained, "--rollout", "1", "--weights", str(world.model))
    assert pairs["trainer, training rows", "engine prefill"]["max"] < 1e-4
    assert pairs["engine prefill", "engine decode"]["mean"] > 1e-3
    assert pairs["trainer, training rows", "engine decode"]["mean"] > 1e-3
