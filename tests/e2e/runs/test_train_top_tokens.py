"""Tests whole runs with losses over the most likely ids: the engine's ids (score centering) and a teacher's ids
(forward KL)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from train_fixtures import World, make_world, rows, run, vime

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


def trained(world: World, name: str, *flags: str) -> dict[str, float]:
    one = ("--colocate", "--actor-num-gpus-per-node", "1", *flags)
    run(vime("train", *world.grpo(name, rollouts=1), *one), world.root / f"{name}.out")
    return rows(world.root / name, "train/step")[0]


def test_on_policy_a_centred_step_is_that_of_reinforce(world: World) -> None:
    """Engine and trainer agree in float32, so that the factors of the centering term are 0."""
    plain = trained(world, "plain", "--pg-loss-type", "reinforce")
    centred = trained(world, "centred", "--use-score-centering", "--score-centering-top-k", "32")
    assert plain["train/grad_norm"] > 0
    for name in ("train/grad_norm", "train/pg_loss", "train/entropy_loss"):
        assert centred[name] == pytest.approx(plain[name], rel=2e-3, abs=1e-5), name


def test_a_teacher_of_the_policys_weights_has_no_forward_kl(world: World) -> None:
    flags = ("--use-opd", "--opd-type", "megatron", "--opd-teacher-load", str(world.model))
    step = trained(world, "opd", *flags, "--opd-loss-type", "forward_kl", "--opd-top-k", "16")
    assert step["train/opd_loss"] == pytest.approx(0.0, abs=1e-5)
    assert step["train/loss"] == pytest.approx(step["train/pg_loss"] + step["train/opd_loss"], abs=1e-6)
