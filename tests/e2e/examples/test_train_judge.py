"""Tests whole runs of examples/judge-reward on the tiny model: the margin of its README, and a run whose judge is
killed.

The judge is the tiny model after supervised training, so the policy learns to write sums.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_train_algorithms import mean, series
from train_fixtures import ROOT, World, launched, make_world, rows, run, samples, vime
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
EXAMPLE = ROOT / "examples/judge-reward"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    for world in make_world():
        warmed = [*world.sft("sft", rollouts=20), "--save-hf", str(world.root / "judge")]
        run(vime("train", *warmed, "--save", str(world.root / "ckpt")), world.root / "sft.out")
        yield world


def example(world: World, name: str, *flags: str) -> list[str]:
    """Returns the example's command with the judge of this world."""
    models = (EXAMPLE / "models.yaml").read_text().replace("runs/judge/model", str(world.root / "judge"))
    (world.root / "models.yaml").write_text(models)
    files = [str(ROOT / "examples/tiny.yaml"), str(EXAMPLE / "config.yaml")]
    return vime(
        *("train", "--config", *files, "--vllm-config", str(world.root / "models.yaml")),
        *("--hf-checkpoint", str(world.model), "--prompt-data", str(world.data / "train.jsonl")),
        *("--run-dir", str(world.root / name), *flags),
    )


def test_the_policy_learns_what_the_judge_likes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE))
    run(example(world, "example"), world.root / "example.out")
    rewards = series(world, "example", "rollout/raw_reward")
    print([round(x, 3) for x in rewards])
    assert len(rewards) == 20 and mean(rewards[:3]) < 0.05 and mean(rewards[-3:]) > 0.15


def test_a_killed_judge_comes_back_and_a_nan_costs_one_sample(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    run_dir = world.root / "killed"
    flags = [
        *("--custom-rm-path", "judge_hooks.by_url", "--num-rollout", "400", "--lr", "1e-5"),
        *("--save-debug-rollout-data", str(run_dir / "samples" / "{rollout_id}.pt")),
    ]
    with launched(example(world, "killed", *flags), world.root / "killed.out") as launch:
        launch.wait_for(lambda: 1 in rows(run_dir, "rollout/step"), "a step", 240)
        model = re.escape(str(world.root / "judge"))
        (server,) = launch.find(rf"^\S+ -m vime\.vllm\.serve vllm\.entrypoints.*--model {model} ")
        os.kill(server, signal.SIGKILL)
        launch.wait_for(lambda: "serves again" in launch.output, "a new judge", 240)
        after = max(rows(run_dir, "rollout/step")) + 2
        launch.wait_for(lambda: after in rows(run_dir, "rollout/step"), "two more steps", 240)
        launch.process.send_signal(signal.SIGINT)
        assert launch.finish(60) == 130
        assert launch.output.count("died and is restarted") == 1
    judge = AutoModelForCausalLM.from_pretrained(world.root / "judge")
    for step in (0, after):
        assert rows(run_dir, "rollout/step")[step]["rollout/removed/reward"] == 16  # one sample per group
        for one in samples(run_dir, step)[::9]:
            removed = one["index"] % 8 == 1
            assert one["remove_sample"] is removed
            if removed:
                assert one["metadata"]["removed"]["reason"] == "reward" and one["reward"] == 0
                continue
            with torch.no_grad():
                logits = judge(torch.tensor([one["tokens"]])).logits[0, -one["response_length"] - 1 : -1]
            answer = torch.tensor(one["tokens"][-one["response_length"] :])[:, None]
            wanted = logits.float().softmax(-1).gather(-1, answer).mean().item()
            assert one["reward"] == pytest.approx(wanted, abs=1e-4)
