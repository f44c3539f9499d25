"""Tests the fixtures of the kit, and the checks of generate functions and agents on the real engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kit_examples
import pytest

from vime.testing import check_agent, check_generate
from vime.testing.engine import TinyEngine
from vime.testing.generation import ROWS

pytestmark = pytest.mark.e2e


def test_a_right_generate_function_passes(tiny_engine: TinyEngine) -> None:
    version = tiny_engine.version
    samples = check_generate(kit_examples.plain, tiny_engine)
    assert len(samples) == 2 * len(ROWS) and tiny_engine.version == version + 1
    assert {sample.weight_versions[0] for sample in samples} == {tiny_engine.version}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tokenised_again", "must be those of its tokens"),
        ("unmasked_tool", "must be those of its tokens"),
        ("made_up_log_probs", "must be those of its tokens"),
        ("short_mask", "loss_mask"),
        ("other_version", r"must have weight version \d+, got \[\d+\]"),
    ],
)
def test_a_wrong_generate_function_fails(tiny_engine: TinyEngine, name: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_generate(getattr(kit_examples, name), tiny_engine, updates=0)


def test_a_hundred_conversations_have_no_drift(tiny_engine: TinyEngine) -> None:
    samples = check_agent(kit_examples.agent, tiny_engine, rollout_max_response_len=24)
    assert len(samples) == 100 and all(0 in sample.loss_mask for sample in samples)
    with pytest.raises(AssertionError, match="must make at most 1 samples, got 2"):
        check_agent(kit_examples.forgetful_agent, tiny_engine, conversations=2, rollout_max_response_len=24)


def test_a_step_of_the_trainer(tiny_trainer: Callable[..., Any]) -> None:
    step = tiny_trainer()
    assert step.metrics["train/grad_norm"] > 0 and len(step.weights) > 10


@pytest.mark.slow
def test_a_whole_run(tiny_run: Callable[..., Any]) -> None:
    run = tiny_run(reward=kit_examples.right)
    assert run.state == "finished" and len(run.metrics) == 2
