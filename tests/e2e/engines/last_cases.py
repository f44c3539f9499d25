"""The last tests on an engine that others share: it sleeps, it is killed, and it learns."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from engine_fixtures import Stack, hf_log_probs, server_of
from train_fixtures import ROOT

from slime.megatron_backend.step.trainer import MegatronTrainer
from slime.protocols import GenerateResult
from slime.rollout.manager import RolloutManager
from vime.backends import parse_config

PROMPT = [14, 5, 8, 13, 21, 30]


def test_sleeping_engines_answer_when_they_wake(stack: Stack) -> None:
    stack.pool.sleep()
    found: list[GenerateResult] = []
    thread = threading.Thread(target=lambda: found.append(stack.generate(PROMPT, seed=2)))
    thread.start()
    time.sleep(1.5)
    assert found == []
    stack.pool.wake()
    thread.join()
    assert found[0].log_probs


def test_a_killed_engine_comes_back_with_the_last_weights(stack: Stack) -> None:
    update = stack.push(stack.other)
    url = stack.pool.engine_urls[0]
    found: list[GenerateResult] = []
    thread = threading.Thread(
        target=lambda: found.extend(
            stack.generate_all([PROMPT] * 16, seed=0, max_new_tokens=300, ignore_eos=True, deadline_s=200)
        )
    )
    thread.start()
    time.sleep(0.2)  # 300 tokens take a second
    os.kill(server_of(url).pid, signal.SIGKILL)
    thread.join()
    assert stack.pool.engine_urls != [url]
    assert len(found) == 16
    for result in found[:4]:
        assert result.weight_versions == [update.version]
        expected = hf_log_probs(stack.other, PROMPT, result.token_ids, 1.0)
        torch.testing.assert_close(torch.tensor(result.log_probs), expected, atol=1e-3, rtol=0)
    stack.pool.check_health()


def test_ppo_with_a_critic_learns(stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags and the margin of examples/ppo-critic, without its processes."""
    monkeypatch.syspath_prepend(str(ROOT / "examples/bench"))  # its reward
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}+{i}=", "label": "x"}) + "\n" for i in range(512)))
    config = parse_config(
        [
            *("--config", str(ROOT / "examples/ppo-critic/ppo.yaml"), "--no-apply-chat-template"),
            *("--hf-checkpoint", str(stack.checkpoint), "--prompt-data", str(prompts)),
            *("--weight-dir", str(stack.weight_dir), "--run-dir", str(tmp_path / "run")),
        ]
    )
    trainer = MegatronTrainer(config, 0, 1, init_method=f"file://{tmp_path}/store")
    manager = RolloutManager(config, stack.pool.client(), 1, {}, put=lambda data: data)
    rewards, losses = [], []
    try:
        for rollout_id in range(config.rollouts):
            stack.publish(trainer.weights_file())
            batch = manager.generate(rollout_id)
            steps = trainer.train(rollout_id, batch.rank_data[0]).steps
            rewards.append(batch.metrics["rollout/raw_reward"])
            losses.append(steps[0]["train/critic-value_loss"])
    finally:
        manager.close()
        trainer.close()
    assert "train/loss" in steps[0]
    assert sum(rewards[:3]) / 3 < 0.6 and sum(rewards[-3:]) / 3 > 0.8, rewards
    assert losses[-1] < 0.2 * losses[0], losses
