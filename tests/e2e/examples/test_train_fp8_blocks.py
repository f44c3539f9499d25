"""Tests whole runs with --fp8-recipe blockwise: an engine that computes the same products has the same bits, and an
engine with --vllm-quantization fp8 agrees better with a trainer in fp8 than with one in bfloat16."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from train_fixtures import World, make_world, rows, run, samples, vime
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BLOCKS = ("--fp8-format", "e4m3", "--fp8-recipe", "blockwise")
BITWISE = ("--colocate", "--actor-num-gpus-per-node", "1", "--rlk-bitwise", "--rlk-consistency")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """The heads have 128 dimensions, so that blocks of queries, keys and values are those of the engine."""
    for made in make_world():
        config = AutoConfig.from_pretrained(made.model, head_dim=128)
        wide = made.root / "wide"
        shutil.copytree(made.model, wide, ignore=shutil.ignore_patterns("*.safetensors"))
        AutoModelForCausalLM.from_config(config).save_pretrained(wide)
        made.model = wide
        yield made


@pytest.mark.parametrize("powers", [False, True], ids=["float32", "ue8m0"])
def test_two_steps_in_fp8_have_the_same_bits(world: World, powers: bool) -> None:
    name = f"bits-{powers}"
    more = ("--force-fp8-ue8m0-scale",) if powers else ()
    said = run(
        vime("train", *world.grpo(name, rollouts=2), *BITWISE, "strict", *BLOCKS, *more),
        world.root / f"{name}.out",
    )
    assert "--fp8-recipe blockwise: attention's linear layers, MLPs and experts compute in fp8" in said
    found = rows(world.root / name, "rollout/step")
    assert sorted(found) == [0, 1]
    for rollout, row in found.items():
        tokens = sum(sample["response_length"] for sample in samples(world.root / name, rollout))
        assert row["rl_kernel/bitwise/differing"] == row["consistency/abs_dlogp_max"] == 0
        assert row["consistency/bitwise_equal_tokens"] == row["consistency/tokens"] == tokens > 100
    steps = rows(world.root / name, "train/step")
    assert len(steps) == 2 and all(step["train/grad_norm"] > 0 for step in steps.values())


def test_an_engine_in_fp8_agrees_better_with_a_trainer_in_fp8(world: World) -> None:
    """The engine rounds weights and activations with vLLM's scheme, and both sides have bfloat16 between products."""
    gaps = {}
    for name, more in (("plain", ()), ("blocks", BLOCKS)):
        flags = ("--colocate", "--actor-num-gpus-per-node", "1", "--bf16", "--rlk-consistency", "audit")
        engine = ("--vllm-quantization", "fp8", "--vllm-dtype", "bfloat16", "--lr", "0")
        argv = [*world.grpo(f"gap-{name}", rollouts=1), *flags, *engine, *more]
        run(vime("train", *argv), world.root / f"gap-{name}.out")
        (step,) = rows(world.root / f"gap-{name}", "train/step").values()
        gaps[name] = step["train/train_rollout_logprob_abs_diff"]
    print(gaps)
    assert 0 < gaps["blocks"] < 0.7 * gaps["plain"]
