"""Tests processes of runs on two GPUs that start again: a killed rollout manager, a whole run, one of two trainer
ranks; and engines that keep keys and values over updates."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from deadly_hooks import order
from fault_cases import killed_with_a_snapshot, manager_killed
from train_fixtures import World, make_world, rows, run, vime

from slime.tracking.journal import read_events
from slime.tracking.ledger import read_ledger

pytestmark = pytest.mark.multi_gpu

ENGINE = (
    *("--vllm-gpu-memory-utilization", "0.1", "--vllm-kv-cache-memory-bytes", str(1 << 30)),
    *("--vllm-max-model-len", "512", "--vllm-enforce-eager", "--lr", "1e-5"),
)
TOLERANCE = 0.02
"""Largest mean difference of log-probs in nats, in bfloat16."""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world("cuda")


def test_a_run_goes_on_with_its_engines_after_its_manager_was_killed(world: World) -> None:
    manager_killed(world, 2, *ENGINE)


def test_a_killed_run_goes_on_with_the_tokens_of_its_snapshot(world: World) -> None:
    killed_with_a_snapshot(world, *ENGINE)


@pytest.mark.parametrize("source", ["disk", "memory"])
def test_two_ranks_start_again_after_one_was_killed(world: World, source: str) -> None:
    """One of the two ranks is killed with the second step's data on its GPU."""
    name, rollouts = f"ranks-{source}", 4
    run_dir = world.root / name
    order(run_dir, "step-1")
    flags = [*world.grpo(name, rollouts=rollouts), "--colocate", "--actor-num-gpus-per-node", "2"]
    flags += ["--rollout-num-gpus-per-engine", "1", "--recover-from", source, *ENGINE]
    flags += ["--save", str(run_dir / "checkpoint"), "--save-interval", "1", "--check-weight-update-equal"]
    out = run(
        vime("train", *flags, "--rollout-data-postprocess-path", "deadly_hooks.in_step"),
        world.root / f"{name}.out",
        timeout_s=400,
    )
    assert out.count("the trainer is back after") == 1 and "Traceback" not in out
    (back,) = read_events(run_dir, ("trainer_restarted",))
    print(f"{name}: the restart took {back['seconds']} s")
    steps = rows(run_dir, "train/step")
    assert sorted(steps) == list(range(rollouts)) and read_ledger(run_dir).is_exact
    assert all(row["train/train_rollout_logprob_abs_diff"] < TOLERANCE for row in steps.values())


def test_engines_keep_keys_and_values_over_an_update(world: World) -> None:
    """With a small learning rate, log-probs from keys and values of older weights differ little."""
    flags = [*world.grpo("kept", rollouts=4), "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1"]
    run(vime("train", *flags, "--flush-cache-interval", "2", *ENGINE), world.root / "kept.out")
    steps = rows(world.root / "kept", "train/step")
    assert sorted(steps) == list(range(4))
    assert all(row["train/train_rollout_logprob_abs_diff"] < TOLERANCE for row in steps.values())
