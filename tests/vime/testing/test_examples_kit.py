"""Checks the functions of the examples with `vime.testing`, as a user's tests do."""

from __future__ import annotations

import pytest

from slime.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std
from slime.types import Sample
from vime.testing import check_agent, check_filter, check_generate, check_loss, check_reward
from vime.testing.engine import TinyEngine


def answers(label: str, *texts: str) -> list[Sample]:
    return [
        Sample(index=i, response=text, label=label, tokens=[1, 2], response_length=1)
        for i, text in enumerate(texts)
    ]


@pytest.mark.parametrize("path", ["untrained.odd_share", "untrained.odd_first"])
def test_rewards_of_the_bench(path: str) -> None:
    check_reward(path, answers("42", "It is 42", "41"))


def test_the_built_in_filter() -> None:
    assert check_filter(check_reward_nonzero_std) == [False, False, True, False, True, False]


@pytest.mark.slow
def test_the_loss_of_the_plug_ins() -> None:
    check_loss("sequence_loss.loss")


@pytest.mark.e2e
@pytest.mark.slow
def test_generate_functions_of_the_plug_ins(tiny_engine: TinyEngine) -> None:
    check_generate("tool_calling.generate", tiny_engine)
    check_agent("agents.solve_and_review", tiny_engine, conversations=20, parts=2)
