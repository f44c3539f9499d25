"""Tests whole runs of examples/openai-agent and examples/calculator-tool on the tiny model, with OpenAI's client and
a tool. The rewards rise by the margins of their READMEs."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from test_train_algorithms import mean, series
from train_fixtures import ROOT, World, make_world, rows, run, samples, vime

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


def test_an_agent_learns_to_call_its_tool(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "examples/openai-agent"))
    files = [str(ROOT / "examples" / file) for file in ("tiny.yaml", "openai-agent/tiny.yaml")]
    model = ("--hf-checkpoint", str(world.model), "--prompt-data", str(world.data / "train.jsonl"))
    saved = ("--save-debug-rollout-data", str(world.root / "agent/samples/{rollout_id}.pt"))
    command = vime("train", "--config", *files, *model, "--run-dir", str(world.root / "agent"), *saved)
    run(command, world.root / "agent.out")
    rewards = series(world, "agent", "rollout/raw_reward")
    print([round(x, 2) for x in rewards])
    assert mean(rewards[:3]) < 0.65 and mean(rewards[-3:]) > 0.85
    for row in rows(world.root / "agent", "rollout/step").values():
        assert row["rollout/session/prefix_mismatch"] == 0 and row["rollout/session/ended_done"] == 1
    for row in rows(world.root / "agent", "train/step").values():
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-4
    for sample in samples(world.root / "agent", 15):
        assert len(sample["rollout_log_probs"]) == len(sample["loss_mask"]) == sample["response_length"]


def test_a_model_learns_from_right_answers_to_call_the_calculator(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, root = ROOT / "examples/calculator-tool", world.root / "calculator"
    lessons, warm, run_dir = root / "lessons.jsonl", root / "warm", root / "run"
    root.mkdir()
    prompts = str(world.data / "train.jsonl")
    run([sys.executable, str(folder / "lessons.py"), prompts, str(lessons)], root / "lessons.out")
    saved = ("--save", str(root / "checkpoint"), "--save-hf", str(warm), "--run-dir", str(root / "sft"))
    model = ("--hf-checkpoint", str(world.model), "--prompt-data", str(lessons))
    run(vime("train", "--config", str(folder / "sft.yaml"), *model, *saved), root / "sft.out", timeout_s=400)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    files = [str(ROOT / "examples" / file) for file in ("tiny.yaml", "calculator-tool/tiny.yaml")]
    saved = ("--run-dir", str(run_dir), "--save-debug-rollout-data", str(run_dir / "samples/{rollout_id}.pt"))
    model = ("--hf-checkpoint", str(warm), "--prompt-data", prompts)
    run(vime("train", "--config", *files, *model, *saved), root / "run.out", timeout_s=400)
    rewards = series(world, "calculator/run", "rollout/raw_reward")
    drawn = [samples(run_dir, number) for number in range(len(rewards))]
    called = [mean([s["metadata"]["session"]["tool_calls"] > 0 for s in its]) for its in drawn]
    print([round(x, 2) for x in rewards], [round(x, 2) for x in called])
    assert mean(rewards[:3]) < 0.4 and mean(rewards[-3:]) > 0.6
    assert mean(called[:3]) < 0.65 and mean(called[-3:]) > 0.9
    for sample in drawn[-1]:
        heard = sample["response"].count("<|im_start|>tool\n")
        masked = len(sample["loss_mask"]) - sum(sample["loss_mask"])
        assert (masked > 0) == (heard > 0)
    for row in rows(run_dir, "rollout/step").values():
        assert row["rollout/session/prefix_mismatch"] == 0
