"""A whole run with adapters: what the engine samples from is what the trainer computes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from safetensors.torch import load_file
from train_fixtures import World, make_world, rows, run, vime

pytestmark = pytest.mark.e2e

COLOCATED = ("--colocate", "--actor-num-gpus-per-node", "1")
LORA = ("--lora-rank", "8", "--lora-alpha", "16", "--lr", "1e-2")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


def train(world: World, name: str, rollouts: int, *flags: str) -> list[dict[str, float]]:
    """The metrics of each step."""
    command = vime("train", *world.grpo(name, rollouts=rollouts), *COLOCATED, *flags)
    run(command, world.root / f"{name}.out")
    return [row for _, row in sorted(rows(world.root / name, "train/step").items())]


def test_engine_and_trainer_have_one_policy(world: World) -> None:
    """Each update brings the adapter alone and is compared with what is live. The checkpoint has it for `peft`."""
    save = world.root / "saved"
    more = ("--check-weight-update-equal", "--use-kl-loss", "--kl-loss-coef", "0.01", "--save", str(save))
    steps = train(world, "lora", 3, *LORA, *more)
    assert len(steps) == 3
    assert max(step["train/train_rollout_logprob_abs_diff_max"] for step in steps) < 1e-5
    assert steps[0]["train/kl_loss"] == pytest.approx(0, abs=1e-7) and steps[-1]["train/kl_loss"] > 1e-3
    saved = load_file(save / "iter_0000002" / "adapter" / "adapter_model.safetensors")
    assert saved and all(tensor.any() for tensor in saved.values())
