"""Tests a run whose metrics a plug-in logs: examples/plugins/answer_metrics.py, and the hook of the training below."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from train_fixtures import ROOT, World, rows, samples

from slime.utils import logging_utils

PLUG_INS = str(ROOT / "examples/plugins")
EVERY = 2


def log_training(args: Any, rollout_id: int, step_id: int, model: Any, *others: Any) -> None:
    """Logs the number of parameters, on the last rank only."""
    if dist.get_rank() == dist.get_world_size() - 1:
        count = sum(p.numel() for part in model for p in part.parameters())
        metrics = {"mine/parameters": count, "train/step": rollout_id * args.num_steps_per_rollout + step_id}
        logging_utils.log(args, metrics, step_key="train/step")


def flags(world: World) -> list[str]:
    """Returns the flags of the hooks. `PLUG_INS` must be on PYTHONPATH."""
    return [
        *("--custom-rollout-log-function-path", "answer_metrics.log_rollout"),
        *("--custom-eval-rollout-log-function-path", "answer_metrics.log_evaluation"),
        *("--custom-megatron-before-train-step-hook-path", "log_hooks.log_training"),
        *("--eval-config", str(world.eval_config), "--eval-interval", str(EVERY)),
    ]


def assert_logged(run_dir: Path, rollouts: int) -> None:
    """Each process logs each metric once under its step, and the metric agrees with the saved samples."""
    for step in range(rollouts):
        row, drawn = rows(run_dir, "rollout/step")[step], samples(run_dir, step)
        right = [sample for sample in drawn if sample["reward"] > 0]
        assert row["answers/right"] == len(right) > 0
        assert row["answers/right_response_len/max"] == max(sample["response_length"] for sample in right)
        rewards = [sample["reward"] for sample in drawn]
        assert row["rollout/raw_reward"] == pytest.approx(sum(rewards) / len(rewards))
        assert row["perf/tokens_per_gpu_per_sec"] > 0 and row["perf/step_time"] > 0
        assert rows(run_dir, "train/step")[step]["mine/parameters"] > 1000
    evaluated = rows(run_dir, "eval/step")
    assert sorted(evaluated) == list(range(0, rollouts + 1, EVERY))
    for row in evaluated.values():
        assert 0 <= row["answers/greedy/solved_prompts"] <= 1 and row["eval/greedy/response_len/max"] <= 3
        assert row["eval/sampled-pass@1"] <= row["eval/sampled-pass@2"]
