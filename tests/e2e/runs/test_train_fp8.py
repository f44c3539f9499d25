"""Tests whole runs of `vime train` whose engine keeps its weights in blocks of fp8, and an audit that measures the
error."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from train_fixtures import World, make_world, rows, run, vime

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


def test_two_steps_and_an_audit(world: World) -> None:
    """The trainer runs in float32. After each update, every tensor of the engine is compared with the trainer's
    rounded tensor. The importance weights of --use-tis agree with the difference that the audit measures."""
    flags = [*world.grpo("fp8", rollouts=2), "--colocate", "--actor-num-gpus-per-node", "1"]
    flags += ["--check-weight-update-equal", "--use-tis", "--rlk-consistency", "audit"]
    flags += ["--vllm-quantization", "fp8", "--vllm-dtype", "bfloat16"]
    said = run(vime("train", *flags), world.root / "out")
    assert "--vllm-quantization fp8: engines sample with weights rounded to fp8" in said
    steps = rows(world.root / "fp8", "train/step")
    assert len(steps) == 2
    for row in steps.values():
        assert 1e-4 < row["train/train_rollout_logprob_abs_diff"] < 0.05
        assert row["train/tis"] != 1
    for row in rows(world.root / "fp8", "rollout/step").values():
        assert row["consistency/tokens"] == 0
        assert row["consistency/not_comparable/dtype"] > 100

    said = run(vime("audit", str(world.root / "fp8"), "--samples", "32"), world.root / "audit")
    assert "the engine computed in bfloat16+fp8" in said
    record = json.loads((world.root / "fp8" / "audit" / "rollout_0.json").read_text())
    assert record["engine_dtype"] == "bfloat16+fp8" and not record["not_comparable"]
    seen, program, decoding = record["pairs"][:3]
    assert seen["tokens"] > 100 and 1e-4 < seen["mean"] < 0.05
    # The precision causes the difference, not the engine's way to compute tokens.
    assert program["mean"] > 0.5 * seen["mean"] and decoding["mean"] < 0.5 * seen["mean"]
