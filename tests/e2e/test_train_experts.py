"""A whole run of `vime train` with experts: trainer and engine hold one model, saved, resumed, exported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import load_file
from train_fixtures import World, make_world, rows, run, samples, vime

pytestmark = pytest.mark.e2e

MODEL_ARGS = (
    *(
        "--num-experts",
        "8",
        "--moe-ffn-hidden-size",
        "128",
        "--moe-router-topk",
        "2",
        "--moe-layer-freq",
        "[1,1]",
    ),
    *(
        "--moe-router-score-function",
        "softmax",
        "--moe-token-dispatcher-type",
        "alltoall",
        "--moe-grouped-gemm",
    ),
    *("--moe-token-drop-policy", "probs", "--moe-router-dtype", "fp32", "--moe-permute-fusion"),
    *("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "0"),
)
"""What slime's script of Qwen3-30B-A3B says of experts, with the numbers of the tiny model."""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world(arch="qwen3-moe-tiny")


def command(world: World, rollouts: int) -> list[str]:
    """Two optimizer steps a rollout; every engine's tensors compared with the trainer's after each update."""
    saved = str(world.root / "checkpoint")
    flags = [*world.grpo("moe", rollouts=rollouts), *MODEL_ARGS]
    flags[flags.index("--global-batch-size") + 1] = "16"
    return vime(
        *("train", *flags, "--colocate", "--actor-num-gpus-per-node", "1", "--check-weight-update-equal"),
        *("--save", saved, "--load", saved, "--save-interval", "1"),
        *("--save-hf", str(world.root / "hf-{rollout_id}")),
    )


def test_experts_train_as_their_engine_computes_and_resume_and_export(world: World) -> None:
    printed = run(command(world, 2), world.root / "first.out")
    assert "--moe-grouped-gemm has no effect" in printed
    printed = run(command(world, 3), world.root / "resumed.out")
    assert "2/3" in printed and "0/3" not in printed
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
    assert not still, "every expert and every router learns"
