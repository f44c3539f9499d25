"""Tests the checks of rewards, filters and losses on right and wrong functions."""

from __future__ import annotations

from typing import Any

import kit_examples
import pytest

from slime.types import Sample
from vime.testing import check_filter, check_loss, check_reward

SAMPLES = [Sample(response="It is 42", label="42"), Sample(response="41", label="42")]


def test_a_right_reward_passes() -> None:
    assert check_reward(kit_examples.right, SAMPLES, expected=[1.0, 0.0]) == [1.0, 0.0]
    assert check_reward(kit_examples.grouped, SAMPLES, group=True) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("not_finite", {}, "finite"),
        ("counting", {}, "must not depend on earlier calls"),
        ("changing", {}, "must not change the sample, got new response"),
        ("slow", {"limit_s": 0.2}, "must take at most 0.2 s"),
        ("fragile", {}, "must be a number, got an error"),
        ("wordy", {}, "must be a number, got an error"),
        ("too_few", {"group": True}, "must be a number, got an error: .*2"),
        ("right", {"expected": [1.0, 1.0]}, "must be 1.0, got 0.0"),
    ],
)
def test_a_wrong_reward_fails(name: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_reward(getattr(kit_examples, name), SAMPLES, **more)


def test_a_function_inside_another_is_an_error() -> None:
    with pytest.raises(
        ValueError, match="reward must be a function of a module, or its path, got .*<locals>"
    ):
        check_reward(lambda args, sample: 0.0, SAMPLES)


def test_filters() -> None:
    assert check_filter(kit_examples.keep_mixed) == [False, False, True, False, True, False]
    with pytest.raises(AssertionError, match="must decide the same twice, got True, then False"):
        check_filter(kit_examples.keep_in_turn)
    with pytest.raises(AssertionError, match="must return DynamicFilterOutput or bool, got str"):
        check_filter(kit_examples.keep_text)
    with pytest.raises(AssertionError, match="must not change samples, got a change in group 0"):
        check_filter(kit_examples.keep_and_mark)
    with pytest.raises(IndexError):
        check_filter(kit_examples.keep_first)
    with pytest.raises(AssertionError, match="must decide"):
        check_filter(kit_examples.keep_mixed, expected=[True] * 6)


def test_a_right_loss_passes() -> None:
    step = check_loss(kit_examples.reinforce)
    assert step.metrics["train/grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mean_of_rank", "two ranks must compute"),
        ("wrong_gradient", "gradient must be that of the loss"),
        ("endless", "the loss must be finite, got inf"),
    ],
)
def test_a_wrong_loss_fails(name: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_loss(getattr(kit_examples, name))
