"""Tests whole runs of the algorithm examples after the tiny layout: each reward rises by the margin of its README."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from train_fixtures import ROOT, World, make_world, rows, run, vime

from slime.tracking.ledger import read_ledger

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


def series(world: World, name: str, metric: str) -> list[float]:
    """Returns the values of a metric in the order of its steps; the value is 0 in a row without the metric."""
    found = rows(world.root / name, "train/step" if metric.startswith("train/") else "rollout/step")
    return [row.get(metric, 0.0) for _, row in sorted(found.items())]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def example(
    world: World, monkeypatch: pytest.MonkeyPatch, name: str, *own: str, data: str = "train.jsonl"
) -> str:
    """Runs an example's files after the tiny layout and returns the output. The first three rollouts use random
    weights."""
    modules = [str(ROOT / "examples" / folder) for folder in ("bench", name)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(modules))
    files = [str(ROOT / "examples" / file) for file in ("tiny.yaml", *(f"{name}/{file}" for file in own))]
    model = ("--hf-checkpoint", str(world.model), "--prompt-data", str(world.data / data))
    command = vime("train", "--config", *files, *model, "--run-dir", str(world.root / name))
    printed = run(command, world.root / f"{name}.out")
    rewards = series(world, name, "rollout/raw_reward")
    print([round(x, 2) for x in rewards])
    assert mean(rewards[:3]) < 0.6
    return printed


@pytest.mark.slow
def test_rloo_learns(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = example(world, monkeypatch, "rloo", "config.yaml")
    assert "step: ref_log_probs (reference) -> train policy\n" in printed
    rewards = series(world, "rloo", "rollout/raw_reward")
    assert len(rewards) == 12 and mean(rewards[-3:]) > 0.8


@pytest.mark.slow
def test_two_roles_of_one_policy_learn_what_each_is_rewarded_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two roles have opposite rewards. A policy with one behaviour for both roles would get 0.5 from each."""
    name = "multi-agent"
    example(world, monkeypatch, name, "config.yaml", "tiny.yaml")
    for role in ("solver", "critic"):
        rewards = series(world, name, f"rollout/raw_reward/{role}")
        print(role, [round(x, 2) for x in rewards])
        assert len(rewards) == 14 and mean(rewards[:3]) < 0.6 and mean(rewards[-3:]) > 0.8
    assert max(series(world, name, "train/train_rollout_logprob_abs_diff")) < 1e-4


@pytest.mark.slow
def test_dapo_learns_and_each_of_its_parts_acts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    example(world, monkeypatch, "dapo", "config.yaml", "tiny.yaml")
    rewards, truncated = (
        series(world, "dapo", f"rollout/{name}") for name in ("raw_reward", "truncated_ratio")
    )
    dropped = series(world, "dapo", "rollout/dynamic_filter/drop_zero_std_1.0")
    assert len(rewards) == 20 and mean(rewards[-3:]) > 0.75
    assert truncated[0] > 0.9 and mean(truncated[-3:]) < 0.1
    assert sum(dropped[-3:]) >= 10
    assert max(series(world, "dapo", "train/pg_clipfrac")) > 0


@pytest.mark.slow
def test_correction_drops_what_fp8_changed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "mismatch-correction"
    example(world, monkeypatch, name, "config.yaml", "tiny.yaml")
    dropped = series(world, name, "train/rs_dropped")
    assert len(dropped) == 12 and 0.05 < dropped[0] < 0.5 and mean(dropped[-3:]) < 0.02
    assert mean(series(world, name, "rollout/raw_reward")[-3:]) > 0.8
    apart = series(world, name, "train/train_rollout_logprob_abs_diff")
    assert apart[0] > 1e-3 and min(series(world, name, "rollout/mismatch_ess")) > 0.99


@pytest.mark.slow
def test_rollouts_ahead_learn_and_lose_no_group(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "fully-async"
    example(world, monkeypatch, name, "config.yaml")
    assert mean(series(world, name, "rollout/raw_reward")[-3:]) > 0.8
    assert max(series(world, name, "rollout/staleness/max")) == 2
    ledger = read_ledger(world.root / name)
    assert ledger.is_exact and ledger.groups_trained == 16 * 16 and ledger.over_limit == 0
    assert not any(ledger.dropped.values())


@pytest.mark.slow
def test_curriculum_spends_its_groups_on_prompts_with_an_advantage(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the 64 prompts never have an advantage. An epoch without a curriculum is four rollouts."""
    name = "curriculum"
    example(world, monkeypatch, name, "config.yaml", "tiny.yaml", data="train.jsonl@[0:64]")
    found = rows(world.root / name, "rollout/step")
    idle = [
        sum(value for metric, value in row.items() if metric.startswith("rollout/zero_std/")) / 16
        for _, row in sorted(found.items())
    ]
    print([round(x, 2) for x in idle])
    assert len(idle) == 20 and mean(idle[:4]) > 0.45 and mean(idle[4:]) < 0.35
    passed_over = series(world, name, "rollout/curriculum/passed_over")
    assert sum(passed_over[:4]) == 0 and min(passed_over[4:]) > 0
    assert mean(series(world, name, "rollout/raw_reward")[-3:]) > 0.7
