"""Tests a whole run of `vime train` with a generate function that posts to the run's router, as slime's plug-ins do.
gateway_cases.py has a short test of the function with only an engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from train_fixtures import PROMPTS, ROOT, SAMPLES, World, make_world, rows, run, samples, vime
from transformers import AutoTokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


def test_tool_calling_trains(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(ROOT / "examples" / "plugins"), os.environ.get("PYTHONPATH", "")])
    )
    flags = [
        *world.grpo("tool", rollouts=2),
        *("--rollout-max-response-len", "24", "--colocate", "--rollout-num-gpus-per-engine", "1"),
        *("--custom-generate-function-path", "tool_calling.generate", "--actor-num-gpus-per-node", "1"),
    ]
    run(vime("train", *flags), tmp_path / "output", timeout_s=400)
    run_dir = world.root / "tool"
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    called = 0
    for rollout in range(2):
        found = samples(run_dir, rollout)
        assert len(found) == PROMPTS * SAMPLES
        for sample in found:
            length = sample["response_length"]
            assert len(sample["loss_mask"]) == len(sample["rollout_log_probs"]) == length <= 24
            assert set(sample["weight_versions"]) == {rollout}
            results = sample["metadata"].get("tool_results", [])
            tool = [
                token
                for token, mask in zip(sample["tokens"][-length:], sample["loss_mask"], strict=True)
                if not mask
            ]
            assert tool == [t for r in results for t in tokenizer.encode(r, add_special_tokens=False)]
            called += bool(results)
    assert called > 0
    steps = rows(run_dir, "train/step")
    assert len(steps) == 2
    for step in steps.values():
        assert step["train/train_rollout_logprob_abs_diff"] < 1e-4
