"""Tests a whole run from a converted checkpoint, with the flags of slime's scripts: --ref-load X_torch_dist, --load
RUN."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from train_fixtures import World, make_world, rows, run, vime

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


def test_a_run_trains_from_a_converted_checkpoint_and_is_converted_back(world: World) -> None:
    """The engine starts from --hf-checkpoint and the trainer from --ref-load: log-probs agree if both are equal."""
    flags = ["--hf-checkpoint", str(world.model)]
    converted = world.root / "model_torch_dist"
    run(vime("export", "--to", "torch_dist", *flags, "--output-dir", str(converted)), world.root / "to.out")
    assert (converted / "latest_checkpointed_iteration.txt").read_text() == "release"
    saved = str(world.root / "run" / "checkpoint")
    command = [
        *world.grpo("run", rollouts=2),
        *("--colocate", "--actor-num-gpus-per-node", "1", "--use-kl-loss", "--kl-loss-coef", "0.01"),
        *("--ref-load", str(converted), "--load", saved, "--save", saved, "--save-interval", "1"),
        "--check-weight-update-equal",
    ]
    printed = run(vime("train", *command), world.root / "run.out")
    assert "Traceback" not in printed
    trained = rows(world.root / "run", "train/step")
    assert sorted(trained) == [0, 1]
    assert trained[0]["train/kl_loss"] == pytest.approx(
        0, abs=1e-6
    )  # the first step starts from the reference
    assert trained[1]["train/kl_loss"] != 0
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-5 for row in trained.values())
    _round_trip(world, saved, flags)


def _round_trip(world: World, saved: str, flags: list[str]) -> None:
    """Converts the trained weights to torch_dist and from there to Hugging Face, and directly to Hugging Face."""
    root: Path = world.root
    trained, through, direct = root / "trained_torch_dist", root / "through", root / "direct"
    run(
        vime("export", "--to", "torch_dist", "--load", saved, *flags, "--output-dir", str(trained)),
        root / "a.out",
    )
    run(vime("export", "--load", str(trained), *flags, "--output-dir", str(through)), root / "b.out")
    run(vime("export", "--load", saved, *flags, "--output-dir", str(direct)), root / "c.out")
    first, second, start = (
        load_file(folder / "model.safetensors") for folder in (through, direct, world.model)
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert any(not torch.equal(tensor, start[name]) for name, tensor in first.items())
