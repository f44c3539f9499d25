"""Whole runs with experts and --use-rollout-routing-replay: exact where engine and trainer agree, closer where not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_fixtures import World, make_world, rows, run, samples, vime

from slime.types import Sample

pytestmark = pytest.mark.e2e

REPLAY = "--use-rollout-routing-replay"
LAYERS, TOPK = 2, 2


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Matrices five times as large as random ones start, so that it matters which experts a token goes to."""
    for made in make_world(arch="qwen3-moe-tiny"):
        path = made.model / "model.safetensors"
        weights = {name: t * 5 if t.dim() > 1 else t for name, t in load_file(path).items()}
        save_file(weights, path, {"format": "pt"})
        yield made


def trained(world: World, name: str, *flags: str, rollouts: int = 1) -> dict[int, dict[str, float]]:
    command = vime(
        *(
            "train",
            *world.grpo(name, rollouts=rollouts),
            "--colocate",
            "--actor-num-gpus-per-node",
            "1",
            *flags,
        )
    )
    run(command, world.root / f"{name}.out")
    return rows(world.root / name, "train/step")


def test_in_fp32_both_choose_the_same_experts(world: World) -> None:
    """Over an update of the weights, for every token and layer."""
    steps = trained(world, "fp32", REPLAY, rollouts=2)
    assert sorted(steps) == [0, 1]
    for row in steps.values():
        assert row["train/routed_experts_differ"] == 0
        assert row["train/train_rollout_logprob_abs_diff_max"] < 1e-4
    for saved in samples(world.root / "fp32", 1):
        sample = Sample.from_dict(saved)
        assert sample.rollout_routed_experts.shape == (len(sample.tokens) - 1, LAYERS, TOPK)


def test_the_engines_choices_bring_the_trainer_closer_to_a_coarser_engine(world: World) -> None:
    """An engine in bf16 chooses others for some tokens; the same samples are trained with and without its choices."""
    (replayed,) = trained(world, "bf16", REPLAY, "--vllm-dtype", "bfloat16").values()
    data = str(world.root / "bf16" / "samples" / "{rollout_id}.pt")
    (own,) = trained(world, "own", "--load-debug-rollout-data", data, "--debug-train-only").values()
    assert 0.001 < replayed["train/routed_experts_differ"] < 0.2
    assert "train/routed_experts_differ" not in own
    mean, largest = "train/train_rollout_logprob_abs_diff", "train/train_rollout_logprob_abs_diff_max"
    assert replayed[mean] < 0.9 * own[mean]
    assert replayed[largest] < 0.6 * own[largest]
    assert torch.tensor([replayed["train/grad_norm"], own["train/grad_norm"]]).isfinite().all()
