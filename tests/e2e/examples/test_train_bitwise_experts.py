"""Tests whole runs of models with experts with --rlk-bitwise: log-probs have the same bits in trainer and engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_fixtures import World, make_world, rows, run, samples, vime
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = [pytest.mark.e2e]

BITWISE = ("--colocate", "--rlk-bitwise", "--rlk-consistency", "strict")
FP8 = ("--fp8-format", "e4m3", "--fp8-recipe", "blockwise")
TWO = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--rollout-num-gpus-per-engine", "2")
LAYOUTS = {
    "tp-ep": (
        *TWO,
        "--expert-model-parallel-size",
        "2",
        "--expert-tensor-parallel-size",
        "1",
        "--vllm-enable-expert-parallel",
    ),
    "etp": (*TWO, "--expert-tensor-parallel-size", "2"),
    "dp-ep": ("--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"),
}
"""Two trainer ranks that share the experts of a layer, the width of each expert, and with data-parallel ranks."""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world(arch="qwen3-moe-tiny")


@pytest.fixture
def glm() -> Iterator[World]:
    """Yields a GLM: a dense layer, then one with sigmoid scores, a shared expert and a bias, which is not zero. As in
    the largest GLM-4.5, a factor multiplies the weights."""
    for made in make_world(arch="glm-moe-tiny"):
        path = made.model / "model.safetensors"
        weights = load_file(path)
        for name in (name for name in weights if name.endswith("e_score_correction_bias")):
            weights[name] = torch.linspace(-0.05, 0.05, len(weights[name]))
        save_file(weights, path, {"format": "pt"})
        config = made.model / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"routed_scaling_factor": 2.5}))
        yield made


@pytest.fixture(scope="module")
def wide(world: World) -> Iterator[World]:
    """The heads have 128 dimensions, and each rank of two has whole groups of 128 inputs."""
    for made in make_world(arch="qwen3-moe-tiny"):
        sizes = {
            "head_dim": 128,
            "moe_intermediate_size": 256,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        config = AutoConfig.from_pretrained(made.model, **sizes)
        model = made.root / "wide"
        shutil.copytree(made.model, model, ignore=shutil.ignore_patterns("*.safetensors"))
        AutoModelForCausalLM.from_config(config).save_pretrained(model)
        made.model = model
        yield made


def compare(world: World, name: str, rollouts: int, *flags: str, ranks: int = 1) -> int:
    """Checks that every token of a run has the same bits on both sides, and returns the number of tokens."""
    argv = [*world.grpo(name, rollouts=rollouts), *BITWISE, "--actor-num-gpus-per-node", str(ranks), *flags]
    run(vime("train", *argv), world.root / f"{name}.out")
    found = rows(world.root / name, "rollout/step")
    assert sorted(found) == list(range(rollouts))
    total = 0
    for rollout, row in found.items():
        tokens = sum(s["response_length"] for s in samples(world.root / name, rollout))
        assert row["rl_kernel/bitwise/differing"] == row["consistency/abs_dlogp_max"] == 0
        assert row["consistency/bitwise_equal_tokens"] == row["consistency/tokens"] == tokens
        total += tokens
    steps = rows(world.root / name, "train/step")
    assert len(steps) >= rollouts and all(step["train/grad_norm"] > 0 for step in steps.values())
    return total


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", *LAYOUTS])
@pytest.mark.parametrize("model", ["world", "glm"])
def test_experts_have_the_same_bits(request: pytest.FixtureRequest, model: str, layout: str) -> None:
    """Softmax scores, and sigmoid scores with a shared expert; one rank, and the layouts of two."""
    flags, ranks = LAYOUTS.get(layout, ()), 1 if layout == "one" else 2
    assert compare(request.getfixturevalue(model), layout, ranks + 1, *flags, ranks=ranks) > 400


@pytest.mark.slow
def test_experts_in_fp8_have_the_same_bits(wide: World) -> None:
    assert compare(wide, "fp8", 3, *FP8) > 400


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp-ep", "etp"])
def test_ranks_in_fp8_have_the_same_bits(wide: World, layout: str) -> None:
    assert compare(wide, f"fp8-{layout}", 3, *FP8, *LAYOUTS[layout], ranks=2) > 400
