"""Tests the rl_kernel switch on real engines: --rlk-fast off and auto train the same model; strict is an error on a
CPU at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from train_fixtures import PROMPTS, SAMPLES, World, launched, make_world, rows, run, samples, vime

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROLLOUTS, STEPS = 10, 20
"""Flags with two optimizer steps per rollout: at the second step, the policy differs from the one that sampled."""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


def flags(world: World, name: str, mode: str) -> list[str]:
    return [
        *world.grpo(name, rollouts=ROLLOUTS),
        *("--colocate", "--actor-num-gpus-per-node", "1", "--rlk-fast", mode),
        *("--use-kl-loss", "--kl-loss-coef", "0.01", "--kl-loss-type", "k3", "--entropy-coef", "0.001"),
        # Every sampled token is the most likely one. All samples of a prompt are then equal and have equal rewards,
        # so training uses the reward itself.
        *("--rollout-top-k", "1", "--disable-rewards-normalization"),
        # The engine runs one request at a time: sums depend on the batch, and they may decide between two near equal
        # tokens.
        *("--vllm-server-concurrency", "1"),
        *("--global-batch-size", str(PROMPTS * SAMPLES // 2)),
    ]


@pytest.fixture(scope="module")
def runs(world: World) -> dict[str, Path]:
    for mode in ("off", "auto"):
        run(vime("train", *flags(world, mode, mode)), world.root / f"{mode}.out")
    return {mode: world.root / mode for mode in ("off", "auto")}


def test_off_and_auto_train_the_same(runs: dict[str, Path]) -> None:
    """The tolerance is from docs/design/rl-kernel-integration.md: losses to 1e-5, gradient norms to a relative 1e-4,
    at every step. Every sampled token is equal, because it is the most likely one."""
    off, auto = (rows(runs[mode], "train/step") for mode in ("off", "auto"))
    assert sorted(off) == sorted(auto) == list(range(STEPS))
    for step in off:
        for name in ("loss", "pg_loss", "ppo_kl", "entropy_loss", "kl_loss"):
            a, b = (steps[step][f"train/{name}"] for steps in (off, auto))
            assert b == pytest.approx(a, abs=1e-5), (step, name)
        norms = [steps[step]["train/grad_norm"] for steps in (off, auto)]
        assert norms[1] == pytest.approx(norms[0], rel=1e-4), step
    for rollout in range(ROLLOUTS):
        tokens = [[s["tokens"] for s in samples(runs[mode], rollout)] for mode in ("off", "auto")]
        assert tokens[0] == tokens[1], rollout
    assert max(abs(row["train/ppo_kl"]) for row in off.values()) > 1e-3
    # The policy moved, so the comparison means something.
    assert off[STEPS - 1]["train/entropy_loss"] < 0.7 * off[0]["train/entropy_loss"]


def test_every_step_counts_its_operators(runs: dict[str, Path]) -> None:
    tokens = PROMPTS * SAMPLES * 8
    for step, row in rows(runs["auto"], "rollout/step").items():
        assert row["rl_kernel/linear_token_loss/calls"] >= 1, step
        trained = row["rl_kernel/linear_token_loss/tokens"]
        assert PROMPTS * SAMPLES <= trained <= tokens
        # Reference log-probs count, and old ones of the second step's samples. The first step computes its own
        # log-probs.
        assert trained < row["rl_kernel/linear_logp/tokens"] < 2 * trained
        # A CPU has no fast kernel, and every call of a kernel reports it.
        for name in ("linear_token_loss", "linear_logp", "grpo_loss", "ratio_kl", "swiglu", "rotary"):
            assert row[f"rl_kernel/{name}/fallbacks"] == row[f"rl_kernel/{name}/calls"] > 0, name
            assert row[f"rl_kernel/{name}/ms"] > 0
        assert row["rl_kernel/fast"] == 0
    for row in rows(runs["off"], "rollout/step").values():
        assert not [name for name in row if name.startswith("rl_kernel/")]


def test_the_decisions_are_printed(world: World, runs: dict[str, Path]) -> None:
    printed = {mode: (world.root / f"{mode}.out").read_text() for mode in runs}
    assert (
        "operators: --rlk-fast auto, the loss has its log-probs from linear_token_loss\n" in printed["auto"]
    )
    assert (
        "operators: --rlk-fast off, the loss has its log-probs from native: --rlk-fast off\n"
        in printed["off"]
    )
    reason = "the tensors are on cpu and the kernels need a CUDA device"
    assert re.search(rf"^  linear_token_loss +reference  {reason}$", printed["auto"], re.MULTILINE)
    assert re.search(r"^  grpo_loss +reference  --rlk-fast off$", printed["off"], re.MULTILINE)


def test_strict_ends_before_anything_starts(world: World) -> None:
    with launched(vime("train", *flags(world, "strict", "strict")), world.root / "strict.out") as launch:
        assert launch.finish(60) != 0
        last = launch.output.splitlines()[-1]
    named = "linear_logp, linear_token_loss, ratio_kl, grpo_loss, swiglu, rotary"
    assert f"--rlk-fast strict must run the fast {named}, but the tensors are on cpu" in last
    assert not (world.root / "strict").exists()
