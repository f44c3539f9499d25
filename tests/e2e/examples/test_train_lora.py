"""Tests whole runs with adapters: engine and trainer compute the same log-probs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file
from train_fixtures import World, make_world, rows, run, samples, vime

pytestmark = pytest.mark.e2e

COLOCATED = ("--colocate", "--actor-num-gpus-per-node", "1")
LORA = ("--lora-rank", "8", "--lora-alpha", "16", "--lr", "1e-2")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


def train(
    world: World, name: str, rollouts: int, *flags: str, command: Sequence[str] = vime("train")
) -> list[dict[str, float]]:
    """Runs the command and returns each step's metrics."""
    run([*command, *world.grpo(name, rollouts=rollouts), *flags], world.root / f"{name}.out")
    return [row for _, row in sorted(rows(world.root / name, "train/step").items())]


def test_engine_and_trainer_have_one_policy(world: World) -> None:
    """Each update sends only the adapter, and the engine compares it with its live copy. The checkpoint stores it for
    `peft`."""
    save = world.root / "saved"
    more = ("--check-weight-update-equal", "--use-kl-loss", "--kl-loss-coef", "0.01", "--save", str(save))
    steps = train(world, "lora", 3, *COLOCATED, *LORA, *more)
    assert len(steps) == 3
    assert max(step["train/train_rollout_logprob_abs_diff_max"] for step in steps) < 1e-5
    assert steps[0]["train/kl_loss"] == pytest.approx(0, abs=1e-7) and steps[-1]["train/kl_loss"] > 1e-3
    saved = load_file(save / "iter_0000002" / "adapter" / "adapter_model.safetensors")
    assert saved and all(tensor.any() for tensor in saved.values())


@pytest.mark.slow
def test_an_engine_killed_in_an_update_comes_back_with_base_and_adapter(world: World) -> None:
    """The engine dies before it has the adapter of version 1. Its successor then samples from the trainer's policy."""
    deadly = [sys.executable, str(Path(__file__).parents[1] / "deadly_update.py"), "1"]
    steps = train(world, "killed", 3, *COLOCATED, *LORA, command=deadly)
    said = (world.root / "killed.out").read_text()
    assert "deadly_update: SIGKILL" in said and said.count("serves again") == 1
    assert_one_policy(world, "killed", steps)


@pytest.mark.slow
def test_adapters_are_broadcast_in_parts(world: World) -> None:
    """gloo broadcasts buckets of a few matrices; the engine compares every live matrix."""
    apart = ("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", "--check-weight-update-equal")
    broadcast = ("--update-weight-transport", "nccl", "--update-weight-buffer-size", "20000")
    assert_one_policy(world, "broadcast", train(world, "broadcast", 3, *apart, *broadcast, *LORA))


def warm(world: World) -> list[str]:
    """Returns flags that start from the tiny model after a supervised warm-up, as in scripts/run-tiny-grpo.sh. Over
    random weights, adapters would have no useful head."""
    saved, out = world.root / "sft-saved", world.root / "warm"
    flags = (
        *(
            "--rollout-batch-size",
            "1280",
            "--global-batch-size",
            "128",
            "--lr",
            "1e-3",
            "--lr-warmup-iters",
            "10",
        ),
        *("--adam-beta2", "0.95", "--weight-decay", "0", "--max-tokens-per-gpu", "16384"),
        *("--save", str(saved), "--no-save-optim"),
    )
    run(vime("train", *world.sft("sft", rollouts=20), *flags), world.root / "sft.out")
    base = ("--load", str(saved), "--hf-checkpoint", str(world.model))
    run(vime("export", *base, "--output-dir", str(out)), world.root / "export.out")
    return [
        *(
            "--hf-checkpoint",
            str(out),
            "--rm-type",
            "gsm8k",
            "--prompt-data",
            str(world.data / "train.jsonl"),
        ),
        *("--input-key", "prompt", "--label-key", "label", "--apply-chat-template", "--rollout-shuffle"),
        *("--num-rollout", "16", "--rollout-batch-size", "64", "--n-samples-per-prompt", "16"),
        *("--rollout-max-response-len", "5", "--global-batch-size", "256", "--eps-clip-high", "0.28"),
        *("--adam-beta2", "0.95", "--weight-decay", "0", "--use-dynamic-batch-size"),
        *("--max-tokens-per-gpu", "16384", "--balance-data", *COLOCATED),
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_adapters_reach_the_reward_of_whole_weights(world: World) -> None:
    """docs/lora.md has the rewards from which the margins follow."""
    common, last = warm(world), {}
    adapters = ("--lr", "2e-3", "--lora-rank", "16", "--lora-alpha", "32", "--lora-merge")
    for name, own in (("whole", ("--lr", "2e-4")), ("adapters", adapters)):
        run_dir = world.root / name
        run(vime("train", *common, *own, "--run-dir", str(run_dir)), world.root / f"{name}.out")
        steps = sorted(rows(run_dir, "rollout/step").items())
        rewards = [row["rollout/raw_reward"] for _, row in steps]
        print(name, [round(x, 2) for x in rewards])
        assert len(rewards) == 16
        last[name] = sum(rewards[-5:]) / 5
        assert last[name] > sum(rewards[:3]) / 3 + 0.1
    assert abs(last["adapters"] - last["whole"]) < 0.08


def assert_one_policy(world: World, name: str, steps: list[dict[str, float]]) -> None:
    assert len(steps) == 3
    for number, step in enumerate(steps):
        assert step["train/train_rollout_logprob_abs_diff_max"] < 1e-5, number
        assert all(s["weight_versions"] == [number] for s in samples(world.root / name, number)), number
