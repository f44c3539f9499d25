"""A whole run of examples/openai-agent on the tiny model: OpenAI's client, a tool, and the margin of its README."""

from __future__ import annotations

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
