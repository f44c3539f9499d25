"""Trains a tiny model of a model_type without a family through `vime train`: its tensors are those of Llama."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from safetensors.torch import load_file
from train_fixtures import World, make_world, rows, run, vime

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture
def world() -> Iterator[World]:
    yield from make_world(arch="seed-oss-tiny")


def test_two_steps_and_an_export(world: World) -> None:
    """After each update, every tensor of the engine is compared with the trainer's. The exported model has the tensors
    of the checkpoint."""
    flags = [*world.grpo("like", rollouts=2), "--save", str(world.root / "checkpoints")]
    out = run(
        vime("train", *flags, "--colocate", "--actor-num-gpus-per-node", "1", "--check-weight-update-equal"),
        world.root / "out",
    )
    assert "model_type seed_oss has no family" in out
    steps = rows(world.root / "like", "train/step")
    assert len(steps) == 2
    for row in steps.values():
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert row["train/grad_norm"] > 0
    exported = world.root / "exported"
    load = ["--load", str(world.root / "checkpoints"), "--hf-checkpoint", str(world.model)]
    run(vime("export", *load, "--output-dir", str(exported)), world.root / "export")
    before, after = (load_file(folder / "model.safetensors") for folder in (world.model, exported))
    assert before.keys() == after.keys()
    assert {name: x.shape for name, x in before.items()} == {name: x.shape for name, x in after.items()}
    assert any((before[name] != after[name]).any() for name in before)
