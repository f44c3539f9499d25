"""Two GRPO steps of a tiny model of each family through `vime train`: trainer and engine hold one model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from train_fixtures import World, make_world, rows, run, vime

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ARCHS = (
    "llama-tiny",
    "mistral-tiny",
    "glm4-tiny",
    "qwen2-moe-tiny",
    "gemma3-tiny",
    "gemma2-tiny",
    "gpt-oss-tiny",
    "deepseek-tiny",
)
"""Rows of scripts/architectures.py. Families with a test of their own are tested there. MiniMax-M2 needs a GPU: vLLM's
router for CPUs lacks its scores."""


@pytest.fixture(params=ARCHS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    yield from make_world(arch=request.param)


def test_two_steps(world: World) -> None:
    """After each update, every tensor of the engine is compared with the trainer's."""
    flags = world.grpo("family", rollouts=2)
    run(
        vime("train", *flags, "--colocate", "--actor-num-gpus-per-node", "1", "--check-weight-update-equal"),
        world.root / "out",
    )
    steps = rows(world.root / "family", "train/step")
    assert len(steps) == 2
    for row in steps.values():
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert row["train/grad_norm"] > 0
