"""Tests the learning rate of a resumed run whose optimizer steps have another number of samples."""

from __future__ import annotations

from typing import Any

import pytest
from trainer_cases import make_samples, rank_data

from slime.megatron_backend.step.trainer import MegatronTrainer

SCHEDULE = {"lr": 0.4, "min_lr": 0.0, "lr_decay_style": "linear", "lr_decay_iters": 10, "lr_warmup_iters": 2}


def rates(trainer: MegatronTrainer, rollout_id: int) -> list[float]:
    steps = trainer.train(rollout_id, rank_data(trainer.config, make_samples(rollout_id))).steps
    return [step["train/lr-pg_0"] for step in steps]


def linear(step: int) -> float:
    """Returns the rate of optimizer step `step`, from 0: two steps up, then eight down."""
    return 0.4 * step / 2 if step < 2 else 0.4 * (1 - (step - 2) / 8)


@pytest.mark.parametrize("size", [8, 4, 2])
@pytest.mark.parametrize("first", [8, 4])
def test_the_schedule_goes_on_at_its_optimizer_step(build, tmp_path, first, size):
    folder = {"save": str(tmp_path / "ckpt"), "load": str(tmp_path / "ckpt")}
    begun = build(**SCHEDULE, **folder, global_batch_size=first)
    found = [rate for rollout in range(2) for rate in rates(begun, rollout)]
    begun.save(1)
    done = len(found)
    assert done == 2 * 8 // first
    resumed = build(**SCHEDULE, **folder, global_batch_size=size)
    found += rates(resumed, 2)
    assert found == pytest.approx([linear(step) for step in range(done + 8 // size)], abs=1e-7)


def test_a_checkpoint_without_the_size_of_its_steps_has_the_present_one(build, tmp_path):
    folder: dict[str, Any] = {"save": str(tmp_path / "ckpt"), "load": str(tmp_path / "ckpt")}
    begun = build(**SCHEDULE, **folder)
    scheduler = begun.policy.scheduler
    rates(begun, 0)
    old = scheduler.state_dict()
    del old["step_samples"]
    resumed = build(**SCHEDULE)
    resumed.policy.scheduler.load_state_dict(old)
    assert resumed.policy.scheduler.num_steps == scheduler_steps(old) == 8
    assert rates(resumed, 1) == pytest.approx([linear(1)])


def scheduler_steps(state: dict[str, Any]) -> int:
    return int(state["num_steps"])
