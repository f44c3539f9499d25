"""Tests whole runs of PPO with a critic on the tiny model: the example learns, and a resumed run continues with equal
metrics."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from train_fixtures import ROOT, World, make_world, rows, run, vime

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


def ppo(world: World, name: str, *flags: str) -> list[str]:
    return vime(
        *("train", "--config", str(ROOT / "examples/ppo-critic/ppo.yaml")),
        *("--hf-checkpoint", str(world.model), "--prompt-data", str(world.data / "train.jsonl")),
        *("--run-dir", str(world.root / name), *flags),
    )


def test_the_example_learns(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "examples/bench"))
    printed = run(ppo(world, "example"), world.root / "example.out")
    assert "step: values (critic) -> old_log_probs (policy) -> train critic -> train policy\n" in printed
    rewards = [row["rollout/raw_reward"] for row in rows(world.root / "example", "rollout/step").values()]
    assert len(rewards) == 16 and sum(rewards[:3]) / 3 < 0.6 and sum(rewards[-3:]) / 3 > 0.8
    steps = rows(world.root / "example", "train/step")
    assert len(steps) == 32 and all("train/critic-value_loss" in step for step in steps.values())
    assert ["train/loss" in step for step in steps.values()] == [False] * 4 + [True] * 28
    assert steps[31]["train/critic-value_loss"] < 0.2 * steps[0]["train/critic-value_loss"]


@pytest.fixture(scope="module")
def whole(world: World) -> dict[int, dict[str, float]]:
    """Returns the optimizer steps of four rollouts in one run, with both models on one rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "examples/bench"))
        run(ppo(world, "whole", "--num-rollout", "4"), world.root / "whole.out")
    return rows(world.root / "whole", "train/step")


@pytest.mark.parametrize("devices", ["shared", "own"])
def test_a_run_that_ended_goes_on(
    world: World, whole: dict[int, dict[str, float]], monkeypatch: pytest.MonkeyPatch, devices: str
) -> None:
    """Three rollouts in one run and a fourth after a restart give the same steps as one run. This also holds if the
    critic has its own rank."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "examples/bench"))
    folder, name = str(world.root / f"checkpoints-{devices}"), f"parts-{devices}"
    for rollouts in ("3", "4"):
        flags = ("--save", folder, "--load", folder, "--num-rollout", rollouts, "--critic-devices", devices)
        printed = run(ppo(world, name, *flags), world.root / f"{name}-{rollouts}.out")
    assert ("step of the critic's ranks: values (critic) -> train critic\n" in printed) == (devices == "own")
    assert (world.root / name / "logs/critic-0.log").is_file() == (devices == "own")
    parts = rows(world.root / name, "train/step")
    assert sorted(parts) == sorted(whole) == list(range(8))
    for step, wanted in whole.items():
        for name in ("train/loss", "train/grad_norm", "train/critic-value_loss", "train/critic-grad_norm"):
            if name in wanted:
                assert parts[step][name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-5), (step, name)
