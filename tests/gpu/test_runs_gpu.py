"""Tests whole runs on one GPU, each with one feature: a draft that trains, updates with adapters only, and updates
that are written directly into the live parameters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from draft_cases import mimo_world, train_with_a_draft
from train_fixtures import World, make_world, rows, run, vime

pytestmark = pytest.mark.gpu

ENGINE = (
    *("--vllm-gpu-memory-utilization", "0.1", "--vllm-kv-cache-memory-bytes", str(1 << 30)),
    *("--vllm-max-model-len", "512", "--vllm-enforce-eager"),
)
TOLERANCE = 0.02
"""Largest difference in nats, in bfloat16."""


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Yields a world with a model of this architecture, or with a MiMo."""
    yield from mimo_world("cuda") if request.param == "mimo" else make_world("cuda", request.param)


@pytest.mark.parametrize("world", ["mimo"], indirect=True)
def test_three_steps_with_a_draft(world: World) -> None:
    """vLLM 0.26 does not count drafted tokens per request, so the test does not check their number."""
    train_with_a_draft(world, TOLERANCE, *ENGINE)


@pytest.mark.parametrize(
    ("world", "more"),
    [("qwen3-50m", ["--check-weight-update-equal"]), ("qwen3-moe-tiny", [])],
    indirect=["world"],
    ids=["dense", "experts"],
)
def test_three_steps_with_adapters(world: World, more: list[str]) -> None:
    """Matrices of a dense model are compared after each update. vLLM's slots of experts cannot be read back."""
    flags = [*world.grpo("adapters", rollouts=3), "--lora-rank", "8", "--lora-alpha", "16", "--lr", "1e-3"]
    flags += ["--colocate", "--actor-num-gpus-per-node", "1", *more, *ENGINE]
    run(vime("train", *flags), world.root / "out")
    steps = rows(world.root / "adapters", "train/step")
    assert len(steps) == 3
    for row in steps.values():
        assert row["train/train_rollout_logprob_abs_diff"] < TOLERANCE and row["train/grad_norm"] > 0


@pytest.mark.parametrize("world", ["qwen3-50m", "qwen3-moe-tiny"], indirect=True)
def test_updates_go_straight_to_their_places(world: World) -> None:
    """Each update is compared. The engine sleeps in between, and its parameters must keep their addresses. vLLM uses
    a kernel of experts that keeps them plain."""
    flags = [*world.grpo("places", rollouts=4), "--colocate", "--actor-num-gpus-per-node", "1"]
    flags += ["--check-weight-update-equal", "--vllm-moe-backend", "triton", *ENGINE]
    run(vime("train", *flags), world.root / "out")
    steps = rows(world.root / "places", "train/step")
    assert len(steps) == 4
    assert all(row["train/train_rollout_logprob_abs_diff"] < TOLERANCE for row in steps.values())
    log = (world.root / "places" / "logs" / "engine-0.log").read_text()
    assert log.count("weight updates are copied into") == 1
