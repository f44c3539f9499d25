"""Tests two GRPO steps of a tiny model per family through `vime train`: trainer and engine have one model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from family_engine import with_remote_config
from train_fixtures import World, make_world, rows, run, vime

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ARCHS = (
    "minimax-m2-tiny",
    "mimo-tiny",
    "olmo3-tiny",
    "qwen3-next-tiny",
    "qwen3-5-tiny",
    "llama-tiny",
    "mistral-tiny",
    "glm4-tiny",
    "qwen2-moe-tiny",
    "gemma3-tiny",
    "gemma2-tiny",
    "gpt-oss-tiny",
    "deepseek-tiny",
    "glm-5-tiny",
    "nemotron-h-tiny",
)
"""Rows of scripts/architectures.py, without the families that have their own tests."""

MORE = {"mimo-tiny": ["--trust-remote-code"], "qwen3-next-tiny": ["--bf16"], "qwen3-5-tiny": ["--bf16"]}
"""Flags of a run per family. MiMo's configuration class is in its files, and vLLM's CPU kernels of gated delta nets
only have bfloat16."""
TOLERANCE = {"qwen3-next-tiny": 0.02, "qwen3-5-tiny": 0.02}


@pytest.fixture(params=ARCHS)
def arch(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def world(arch: str) -> Iterator[World]:
    for world in make_world(arch=arch):
        if arch == "mimo-tiny":
            with_remote_config(world.model, "mimo")
        yield world


def test_two_steps(world: World, arch: str) -> None:
    """After each update, every tensor of the engine is compared with the trainer's."""
    flags = [*world.grpo("family", rollouts=2), *MORE.get(arch, [])]
    run(
        vime("train", *flags, "--colocate", "--actor-num-gpus-per-node", "1", "--check-weight-update-equal"),
        world.root / "out",
    )
    steps = rows(world.root / "family", "train/step")
    assert len(steps) == 2
    for row in steps.values():
        assert row["train/train_rollout_logprob_abs_diff"] < TOLERANCE.get(arch, 1e-5)
        assert row["train/grad_norm"] > 0
