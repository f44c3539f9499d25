"""Tests a whole run of `vime train` with experts: trainer and engine have one model, which is saved, resumed and
exported."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_fixtures import World, make_world, rows, run, samples, vime

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

HOW = (
    "--moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-router-dtype fp32 --moe-permute-fusion "
    "--moe-aux-loss-coeff 0 --num-experts 8 --moe-ffn-hidden-size 128 --moe-router-topk 2 "
)
MODEL_ARGS = {
    "qwen3-moe-tiny": HOW + "--moe-layer-freq [1,1] --moe-router-score-function softmax "
    "--moe-token-drop-policy probs --moe-router-load-balancing-type aux_loss",
    "glm-moe-tiny": HOW + "--moe-layer-freq [0]*1+[1]*1 --moe-router-score-function sigmoid "
    "--moe-router-pre-softmax --moe-router-enable-expert-bias --moe-router-bias-update-rate 0 "
    "--moe-shared-expert-intermediate-size 128 --moe-router-load-balancing-type seq_aux_loss "
    "--moe-router-topk-scaling-factor 1.0 --add-qkv-bias --rotary-percent 0.5",
}
"""Flags for experts from slime's scripts of Qwen3-30B-A3B and GLM-4.5-Air, with the numbers of the tiny models."""
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(params=MODEL_ARGS)
def arch(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def world(arch: str) -> Iterator[World]:
    for world in make_world(arch=arch):
        file = world.model / "model.safetensors"
        tensors = load_file(file)
        if arch == "glm-moe-tiny":  # a new model's bias is zero and would prove nothing
            tensors[BIAS] = torch.linspace(-0.05, 0.05, 8)
            save_file(tensors, file, metadata={"format": "pt"})
        yield world


def command(world: World, arch: str, rollouts: int) -> list[str]:
    """Returns a command with two optimizer steps per rollout. After each update, every engine's tensors are compared
    with the trainer's."""
    saved = str(world.root / "checkpoint")
    flags = [*world.grpo("moe", rollouts=rollouts), *MODEL_ARGS[arch].split()]
    flags[flags.index("--global-batch-size") + 1] = "16"
    return vime(
        *("train", *flags, "--colocate", "--actor-num-gpus-per-node", "1", "--check-weight-update-equal"),
        *("--save", saved, "--load", saved, "--save-interval", "1"),
        *("--save-hf", str(world.root / "hf-{rollout_id}")),
    )


def test_experts_train_as_their_engine_computes_and_resume_and_export(world: World, arch: str) -> None:
    printed = run(command(world, arch, 2), world.root / "first.out")
    assert "--moe-grouped-gemm has no effect" in printed
    printed = run(command(world, arch, 3), world.root / "resumed.out")
    assert re.findall(r"^\s*(\d)/3 ", printed, re.MULTILINE) == ["2"]
    trained = rows(world.root / "moe", "train/step")
    assert sorted(trained) == list(range(6))
    for step, row in trained.items():
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-5, step
        assert row["train/train_rollout_logprob_abs_diff_max"] < 1e-4, step
        assert row["train/grad_norm"] > 0
    for rollout in range(3):
        assert all(s["weight_versions"] == [rollout] for s in samples(world.root / "moe", rollout))
    flags = ("--load", str(world.root / "checkpoint"), "--hf-checkpoint", str(world.model))
    run(vime("export", *flags, "--output-dir", str(world.root / "exported")), world.root / "export.out")
    exported, live, first = (
        load_file(world.root / name / "model.safetensors") for name in ("exported", "hf-2", "model")
    )
    assert exported.keys() == live.keys() == first.keys()
    assert all(torch.equal(tensor, live[name]) for name, tensor in exported.items())
    still = [name for name, tensor in exported.items() if torch.equal(tensor, first[name])]
    assert still == [BIAS] * (arch == "glm-moe-tiny"), "every expert and every router learns"


@pytest.mark.slow
def test_replicas_of_an_engine_share_the_experts(world: World) -> None:
    """As in slime's scripts, each replica has the whole attention, and the replicas share the experts. Each replica
    compares its own experts after each update."""
    flags = world.grpo("spread", rollouts=2)
    engine = ["--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2", "--num-gpus-per-node", "3"]
    spread = ["--sglang-dp-size", "2", "--sglang-ep-size", "2", "--sglang-enable-dp-attention"]
    one = ["--actor-num-gpus-per-node", "1", "--check-weight-update-equal"]
    run(vime("train", *flags, *engine, *spread, *one), world.root / "out-spread", timeout_s=500)
    steps = rows(world.root / "spread", "train/step")
    assert len(steps) == 2
    for row in steps.values():
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-5
