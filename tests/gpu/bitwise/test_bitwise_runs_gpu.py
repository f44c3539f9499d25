"""Tests whole runs with --rlk-bitwise: models whose layers have sliding windows, or frequencies of YaRN, and two
context-parallel ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from train_fixtures import World, make_world, rows, run, samples, vime

ROLLOUTS, WINDOW = 2, 24
"""The window is shorter than most samples, so that an engine frees pages during a request. The kernel has steps of 64
keys, and samples of up to about 180 tokens also begin after its first step."""
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
    "original_max_position_embeddings": 1024,
}
FLAGS = (
    *("--colocate", "--rlk-bitwise", "--rlk-consistency", "strict"),
    *("--rollout-max-response-len", "160", "--max-tokens-per-gpu", "1024"),
)
ENGINE = (
    *("--vllm-gpu-memory-utilization", "0.1", "--vllm-kv-cache-memory-bytes", str(1 << 30)),
    *("--vllm-max-model-len", "512"),
)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Yields a world with a model of this architecture. A Mistral gets the window and is in bfloat16."""
    for made in make_world("cuda", request.param):
        if request.param == "mistral-tiny":
            change(made, sliding_window=WINDOW, dtype="bfloat16")
        yield made


def change(world: World, **changes: object) -> None:
    file = world.model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def check_run(world: World, *flags: str) -> None:
    """Trains, and checks that every token of the run has the same bits on both sides."""
    run_dir = world.root / "run"
    argv = [*world.grpo("run", rollouts=ROLLOUTS), *FLAGS, *flags]
    run(vime("train", *argv), world.root / "run.out", timeout_s=420)
    found, trained = rows(run_dir, "rollout/step"), rows(run_dir, "train/step")
    assert sorted(found) == sorted(trained) == list(range(ROLLOUTS))
    assert all(row["train/grad_norm"] > 0 for row in trained.values())
    longest = 0
    for rollout, row in found.items():
        lengths = [sample["response_length"] for sample in samples(run_dir, rollout)]
        assert row["rl_kernel/bitwise/differing"] == row["consistency/abs_dlogp_max"] == 0
        assert row["consistency/bitwise_equal_tokens"] == row["consistency/tokens"] == sum(lengths)
        longest = max(longest, *lengths)
    assert longest > WINDOW + 64


@pytest.mark.gpu
@pytest.mark.parametrize("world", ["mistral-tiny"], indirect=True)
def test_a_model_with_windows_has_the_same_bits(world: World) -> None:
    check_run(world, "--actor-num-gpus-per-node", "1", *ENGINE)


@pytest.mark.gpu
@pytest.mark.parametrize("world", ["qwen3-50m"], indirect=True)
def test_a_model_with_yarn_has_the_same_bits(world: World) -> None:
    change(world, rope_scaling=None, rope_parameters=YARN)
    check_run(world, "--actor-num-gpus-per-node", "1", *ENGINE)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("way", ["all_gather", "a2a"])
@pytest.mark.parametrize("world", ["qwen3-50m", "mistral-tiny"], indirect=True)
def test_context_parallel_ranks_have_the_bits_of_engines_of_one(world: World, way: str) -> None:
    flags = (
        "--actor-num-gpus-per-node",
        "2",
        "--num-gpus-per-node",
        "2",
        "--rollout-num-gpus-per-engine",
        "1",
    )
    check_run(world, *flags, "--context-parallel-size", "2", "--cp-comm-type", way, *ENGINE)
