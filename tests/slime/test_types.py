"""The record of a sample: what its border check refuses, how a response grows, and that it survives being saved."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from slime.types import Sample


def good(**changes) -> Sample:
    values = {
        "group_index": 3,
        "index": 7,
        "tokens": [1, 2, 3, 4, 5],
        "response_length": 3,
        "loss_mask": [1, 0, 1],
        "rollout_log_probs": [-0.1, 0.0, -2.5],
    }
    return Sample(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"response_length": 0}, r"response_length must lie in \(0, len\(tokens\)\), got 0 with 5 tokens"),
        ({"response_length": 5}, "response_length must lie in .* got 5 with 5 tokens"),
        ({"loss_mask": [1, 1]}, "loss_mask must have one entry per response token, got 2 for 3 tokens"),
        ({"loss_mask": [0, 0, 0]}, "loss_mask must not be empty, got all zeros .* set remove_sample"),
        ({"rollout_log_probs": None}, "rollout_log_probs must have one entry .* got none for 3 tokens"),
        ({"rollout_log_probs": [-0.1]}, "rollout_log_probs must have one entry .* got 1 for 3 tokens"),
        ({"rollout_log_probs": [-1.0, math.nan, 0.0]}, "must be finite, got nan at position 1"),
        ({"rollout_log_probs": [-1.0, 0.0, -math.inf]}, "must be finite, got -inf at position 2"),
    ],
)
def test_check_names_the_fault_and_the_sample(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        good(**changes).check()
    assert "sample 7 of group 3" in str(caught.value)


def test_check_accepts_what_can_be_trained_on():
    good().check()
    good(loss_mask=None).check()
    good(loss_mask=[0, 0, 0], remove_sample=True).check()
    good(rollout_log_probs=None).check(require_log_probs=False)
    with pytest.raises(ValueError, match="loss_mask"):
        good(loss_mask=[1], rollout_log_probs=None).check(require_log_probs=False)


def test_append_response_tokens():
    """The model's tokens carry log-probs and are trained on, a tool's are not."""
    prompt = [10, 11]
    sample = Sample(tokens=prompt)
    sample.append_response_tokens([1, 2], [-0.5, -0.25], text="ab")
    sample.append_response_tokens([3], trainable=False, text="<tool>")
    sample.append_response_tokens([4], [-1.0], text="c")
    assert (sample.tokens, sample.response, sample.response_length) == ([10, 11, 1, 2, 3, 4], "ab<tool>c", 4)
    assert sample.loss_mask == [1, 1, 0, 1]
    assert sample.rollout_log_probs == [-0.5, -0.25, 0.0, -1.0]
    assert sample.effective_response_length == 3
    assert prompt == [10, 11]  # the siblings of a group share it
    sample.check()


def test_append_to_a_response_without_a_mask():
    sample = Sample(tokens=[9, 1, 2], response_length=2, rollout_log_probs=[-1.0, -2.0])
    sample.append_response_tokens([3], trainable=False)
    assert sample.loss_mask == [1, 1, 0] and sample.rollout_log_probs == [-1.0, -2.0, 0.0]


@pytest.mark.parametrize(("log_probs", "got"), [(None, "none"), ([-1.0], "1")])
def test_append_refuses_missing_log_probs(log_probs, got):
    with pytest.raises(ValueError, match=f"one entry per generated token, got {got} for 2 tokens"):
        Sample(tokens=[1]).append_response_tokens([2, 3], log_probs)


def test_effective_length_without_a_mask_is_the_response():
    assert good(loss_mask=None).effective_response_length == 3


def test_reward_value():
    args = SimpleNamespace(reward_key="accuracy")
    assert good(reward=1).get_reward_value(args) == 1.0
    assert good(reward={"accuracy": 0.5, "format": 1}).get_reward_value(args) == 0.5
    with pytest.raises(
        ValueError, match=r"--reward-key must name .* got 'accuracy'; sample 7 has \['format'\]"
    ):
        good(reward={"format": 1}).get_reward_value(args)
    with pytest.raises(ValueError, match="reward must be set before training, got None for sample 7"):
        good().get_reward_value(args)


@pytest.mark.parametrize(("rows", "got"), [(None, "none"), (np.zeros((5, 2, 2), np.uint8), "5")])
def test_experts_of_each_token_but_the_last_where_they_are_needed(rows, got):
    sample = good(rollout_routed_experts=rows)
    sample.check()
    with pytest.raises(
        ValueError, match=f"one row per token but the last, got {got} for 5 tokens of sample 7"
    ):
        sample.check(require_experts=True)
    sample.rollout_routed_experts = np.zeros((4, 2, 2), np.uint8)
    sample.check(require_experts=True)


def test_dict_round_trip():
    """Through JSON, status by name, without sharing the lists of the record."""
    sample = good(
        status=Sample.Status.TRUNCATED, metadata={"a": [1]}, weight_versions=[3, 4], reward={"x": 1.0}
    )
    data = sample.to_dict()
    assert data["status"] == "truncated"
    assert Sample.from_dict(json.loads(json.dumps(data))) == sample
    data["tokens"].append(6)
    assert sample.tokens == [1, 2, 3, 4, 5]
    assert Sample.from_dict({"status": Sample.Status.FAILED}).status is Sample.Status.FAILED
    assert Sample.from_dict({}) == Sample()
    rows = np.arange(4 * 2 * 3, dtype=np.uint16).reshape(4, 2, 3) * 11
    sample.rollout_routed_experts = rows
    again = Sample.from_dict(json.loads(json.dumps(sample.to_dict()))).rollout_routed_experts
    assert again.dtype == np.uint16 and (again == rows).all()
    with pytest.raises(TypeError, match="colour"):
        Sample.from_dict({"colour": 1})
