"""Tests whole runs with the newest flags of slime and upstream vime: Muon, optimizer steps of several sizes, Adam's
state in files, and adapters for a part of the modules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from safetensors.torch import load_file
from train_fixtures import PROMPTS, SAMPLES, World, make_world, rows, run, vime

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
ONE = ("--colocate", "--actor-num-gpus-per-node", "1")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


def test_muon_trains_in_steps_of_several_sizes_and_resumes(world: World) -> None:
    """A schedule with the sizes of a rollout's samples: its optimizer steps train all samples."""
    total = PROMPTS * SAMPLES
    sizes = [total // 2, total // 4, total - total // 2 - total // 4]
    schedule = ("--global-batch-size-schedule", ",".join(map(str, sizes)))
    flags = (*ONE, *schedule, "--optimizer", "muon", "--save", str(world.root / "saved"))
    run(vime("train", *world.grpo("muon", rollouts=1), *flags), world.root / "muon.out")
    again = (*flags, "--load", str(world.root / "saved"))
    run(vime("train", *world.grpo("muon", rollouts=2), *again), world.root / "muon-2.out")
    steps = rows(world.root / "muon", "train/step")
    assert [steps[n]["train/global_batch_size"] for n in range(6)] == 2 * sizes
    assert all(step["train/grad_norm"] > 0 for step in steps.values())


def test_adapters_of_a_part_of_the_modules_train_with_adam_in_files(world: World) -> None:
    state = world.root / "state"
    flags = (
        *("--stream-optimizer-state-to-disk", "--offload-train-disk-dir", str(state)),
        *("--lora-rank", "4", "--exclude-modules", "down_proj,o_proj", "--lora-adapter-name", "mine"),
        *("--save", str(world.root / "lora"), "--check-weight-update-equal"),
    )
    run(vime("train", *world.grpo("lora-run", rollouts=2), *ONE, *flags), world.root / "lora.out")
    assert state.is_dir() and not list(state.iterdir())
    (adapter,) = (world.root / "lora").rglob("adapter_model.safetensors")
    modules = {name.split(".lora_")[0].rpartition(".")[2] for name in load_file(adapter)}
    assert modules and not modules & {"down_proj", "o_proj"} and "q_proj" in modules
