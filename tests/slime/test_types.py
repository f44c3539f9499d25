"""Tests the record of a sample: the errors of its border check, how a response grows, and that a saved sample loads
unchanged."""

from __future__ import annotations

import base64
import json
import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

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
    """The model's tokens have log-probs and are trained on; a tool's tokens are not trained on."""
    prompt = [10, 11]
    sample = Sample(tokens=prompt)
    sample.append_response_tokens(tokens=[1, 2], log_probs=[-0.5, -0.25], text="ab")
    sample.append_response_tokens(tokens=[3], trainable=False, text="<tool>")
    sample.append_response_tokens(tokens=[4], log_probs=[-1.0], text="c")
    assert (sample.tokens, sample.response, sample.response_length) == ([10, 11, 1, 2, 3, 4], "ab<tool>c", 4)
    assert sample.loss_mask == [1, 1, 0, 1]
    assert sample.rollout_log_probs == [-0.5, -0.25, 0.0, -1.0]
    assert sample.effective_response_length == 3
    assert sample.tokens is prompt
    sample.check()


def test_the_lists_that_a_plug_in_holds_grow():
    """The lists grow from an empty mask on, as retool begins, and with columns."""
    tokens, mask, log_probs, margin = [7], [], [], [0.25]
    sample = Sample(tokens=tokens, loss_mask=mask, rollout_log_probs=log_probs)
    sample.append_response_tokens(tokens=[1], log_probs=[-0.5], columns={"margin": margin})
    held = sample.columns["margin"]
    sample.append_response_tokens(tokens=[2, 3], trainable=False)
    sample.append_response_tokens(tokens=[4], log_probs=[-1.0], columns={"margin": [0.5]})
    assert sample.tokens is tokens and sample.loss_mask is mask and sample.rollout_log_probs is log_probs
    assert (tokens, mask, log_probs) == ([7, 1, 2, 3, 4], [1, 0, 0, 1], [-0.5, 0.0, 0.0, -1.0])
    assert sample.columns["margin"] is held == [0.25, None, None, 0.5] and margin == [0.25]
    sample.check()


def test_what_is_passed_is_not_held():
    ids, log_probs = [1, 2], [-0.5, -0.25]
    sample = Sample(tokens=[7])
    sample.append_response_tokens(tokens=ids, log_probs=log_probs)
    sample.append_response_tokens(tokens=[3], trainable=False)
    assert ids == [1, 2] and log_probs == [-0.5, -0.25]
    other = Sample(tokens=(7,), rollout_top_p_token_offsets=[0])
    other.append_response_tokens(tokens=np.array([1]), log_probs=[-1.0])
    assert other.tokens == [7, 1] and other.rollout_top_p_token_offsets == [0, 0]


def test_an_answer_without_tokens_leaves_the_lists():
    sample = Sample(tokens=[7])
    sample.append_response_tokens(text="", meta_info=ANSWER)
    assert sample.loss_mask is None and sample.rollout_log_probs is None
    sample.append_response_tokens(tokens=[], log_probs=[])
    assert sample.loss_mask is None and sample.rollout_log_probs == []


def test_generated_tokens_after_some_without_log_probs():
    """The log-probs of the earlier tokens are unknown, so 0.0 would be wrong; a tool's tokens need no log-probs."""
    sample = Sample(tokens=[7, 1, 2], response_length=2)
    with pytest.raises(ValueError, match="rollout_log_probs must be set .* got none for 2 response tokens"):
        sample.append_response_tokens(tokens=[3], log_probs=[-1.0])
    assert sample.tokens == [7, 1, 2] and sample.loss_mask is None
    sample.append_response_tokens(tokens=[3], trainable=False)
    assert sample.rollout_log_probs == [0.0] * 3 and sample.loss_mask == [1, 1, 0]


def encoded(rows: np.ndarray) -> str:
    return base64.b64encode(rows.astype(np.int32).tobytes()).decode()


def test_experts_of_an_answer_are_kept():
    """The rows are those of /generate with return_routed_experts: for the whole sample, or from a token on."""
    args = SimpleNamespace(num_layers=2, moe_router_topk=3)
    rows = np.arange(4 * 2 * 3).reshape(4, 2, 3)
    sample = Sample(tokens=[7])
    sample.append_response_tokens(
        args, tokens=[1, 2], log_probs=[-1.0, -1.0], meta_info={"routed_experts": encoded(rows[:2])}
    )
    assert sample.rollout_routed_experts.tolist() == rows[:2].tolist()
    answer = {"routed_experts": encoded(300 + rows[1:]), "routed_experts_start_len": 1}
    sample.append_response_tokens(
        args, tokens=[3, 4], log_probs=[-1.0, -1.0], meta_info=answer, update_terminal_info=False
    )
    assert sample.rollout_routed_experts.tolist() == [*rows[:1].tolist(), *(300 + rows[1:]).tolist()]
    sample.check(require_experts=True)
    with pytest.raises(ValueError, match=r"routed_experts must have \[5, 2, 3\] entries, .* got 24"):
        sample.append_response_tokens(
            args, tokens=[5], log_probs=[-1.0], meta_info={"routed_experts": encoded(rows)}
        )
    assert len(sample.tokens) == 5
    answer = {"routed_experts": encoded(rows[:1])}
    for added, wanted in ({"routed_experts_shape": [1, 2, 3]}, rows[:1].tolist()), ({}, None):
        other = Sample(tokens=[7])
        other.append_response_tokens(tokens=[1], log_probs=[-1.0], meta_info=answer | added)
        found = other.rollout_routed_experts
        assert (found if found is None else found.tolist()) == wanted


def test_append_to_a_response_without_a_mask():
    sample = Sample(tokens=[9, 1, 2], response_length=2, rollout_log_probs=[-1.0, -2.0])
    sample.append_response_tokens(tokens=[3], trainable=False)
    assert sample.loss_mask == [1, 1, 0] and sample.rollout_log_probs == [-1.0, -2.0, 0.0]


@pytest.mark.parametrize(("log_probs", "got"), [(None, "none"), ([-1.0], "1")])
def test_append_refuses_missing_log_probs(log_probs, got):
    with pytest.raises(ValueError, match=f"one entry per generated token, got {got} for 2 tokens"):
        Sample(tokens=[1]).append_response_tokens(tokens=[2, 3], log_probs=log_probs)


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
    assert good(reward={"a": 1}).get_reward_value(SimpleNamespace(reward_key=None)) == {"a": 1}


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
    """The sample goes through JSON, with its status by name, and shares no list with the record."""
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


ANSWER = {
    "finish_reason": {"type": "length", "length": 2},
    "weight_version": "7",
    "prompt_tokens": 2,
    "cached_tokens": 1,
    "completion_tokens": 2,
    "spec_accept_token_num": 1,
    "spec_draft_token_num": 4,
    "spec_verify_ct": 2,
}


def test_append_takes_what_plug_ins_pass():
    """append_response_tokens accepts arguments by name after `args`, arrays and tensors, and the engine's
    `meta_info`."""
    sample, args = Sample(tokens=[10, 11]), SimpleNamespace()
    answer = {**ANSWER, "finish_reason": {"type": "abort"}}
    sample.append_response_tokens(
        args, tokens=np.array([1, 2]), log_probs=torch.tensor([-0.5, -0.25]), meta_info=answer, text="ab"
    )
    assert sample.status is Sample.Status.ABORTED
    sample.append_response_tokens(args, tokens=[3], trainable=False, text="<tool>")
    sample.append_response_tokens(args, tokens=[4], log_probs=[-1.0], meta_info=ANSWER, text="c")
    assert sample.tokens == [10, 11, 1, 2, 3, 4] and sample.response == "ab<tool>c"
    assert all(type(token) is int for token in sample.tokens)
    assert sample.loss_mask == [1, 1, 0, 1] and sample.rollout_log_probs == [-0.5, -0.25, 0.0, -1.0]
    # One version per answer.
    assert sample.status is Sample.Status.TRUNCATED and sample.weight_versions == [7, 7]
    assert sample.prefix_cache_info == Sample.PrefixCacheInfo(cached_tokens=2, total_prompt_tokens=4)
    assert sample.prefix_cache_info.prefix_cache_hit_rate == 0.5
    assert sample.spec_info == Sample.SpecInfo(2, 8, 4, 4)
    assert (sample.spec_info.spec_accept_rate, sample.spec_info.spec_accept_length) == (0.25, 1.0)
    sample.check()


def test_an_answer_that_is_not_the_end_changes_tokens_only():
    for settings in (
        {"update_terminal_info": False, "meta_info": ANSWER},
        {"meta_info": {"prompt_tokens": 9}},
    ):
        sample = Sample(tokens=[10])
        sample.append_response_tokens(tokens=[1], log_probs=[-0.5], **settings)
        assert sample.response_length == 1 and sample.status is Sample.Status.PENDING
        assert sample.prefix_cache_info == Sample.PrefixCacheInfo() and sample.weight_versions == []
    sample.append_response_tokens(meta_info={**ANSWER, "finish_reason": {"type": "stop"}})
    assert sample.status is Sample.Status.COMPLETED and sample.weight_versions == [7]
    sample.update_from_meta_info(None, {**ANSWER, "weight_version": "v8"})
    assert sample.status is Sample.Status.TRUNCATED and sample.weight_versions == [7, "v8"]


def test_a_finish_reason_that_is_not_known_leaves_the_status():
    sample = Sample(tokens=[10], status=Sample.Status.ABORTED)
    answer = {**ANSWER, "finish_reason": {"type": "new"}}
    sample.append_response_tokens(tokens=[1], log_probs=[-0.5], meta_info=answer)
    assert sample.status is Sample.Status.ABORTED and sample.weight_versions == [7]
    assert sample.prefix_cache_info.total_prompt_tokens == 2 and sample.spec_info.spec_verify_ct == 2
    sample.update_from_meta_info(None, {"finish_reason": "stop"})
    assert sample.status is Sample.Status.COMPLETED and sample.weight_versions == [7]


def test_routed_experts_of_a_plug_in_may_be_lists():
    sample = good(rollout_routed_experts=[[0, 1], [2, 3]])
    again = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
    assert again.rollout_routed_experts == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainable": False, "log_probs": [-1.0]}, "log_probs must be left out .* got 1"),
        ({"trainable": False, "log_probs": []}, "log_probs must be left out .* got 0"),
        ({"log_probs": [-1.0, -2.0]}, "log_probs must have one entry per generated token, got 2 for 1"),
        ({"log_probs": None}, "log_probs must have one entry per generated token, got none for 1"),
    ],
)
def test_append_refuses_before_it_changes_anything(settings, message):
    sample = good()
    before = sample.to_dict()
    with pytest.raises(ValueError, match=message):
        sample.append_response_tokens(tokens=[9], **settings)
    assert sample.to_dict() == before


def test_a_sample_that_is_reset_is_built_again():
    """A plug-in that retries resets slime's fields, and our fields follow."""
    sample = good(status=Sample.Status.FAILED, columns={"margin": [0.5, None, 0.5]}, weight_versions=[3])
    sample.tokens, sample.response, sample.response_length = [1, 2], "", 0
    sample.rollout_log_probs = sample.loss_mask = None
    sample.weight_versions, sample.spec_info = [], Sample.SpecInfo()
    sample.append_response_tokens(tokens=[5, 6], log_probs=[-1.0, -2.0], meta_info=ANSWER)
    assert sample.tokens == [1, 2, 5, 6] and sample.loss_mask == [1, 1] and sample.columns == {}
    assert sample.weight_versions == [7] and sample.spec_info.completion_token_num == 2
    sample.check()
    sample.response_length = 1  # this resets only half of the fields
    with pytest.raises(
        ValueError, match="loss_mask must .* got 2 for 1 tokens of sample 7 .* to start .* again"
    ):
        sample.append_response_tokens(tokens=[8], log_probs=[-1.0])


def test_what_a_plug_in_adds_is_kept():
    sample = good(spec_info=Sample.SpecInfo(1, 2, 3, 4), prefix_cache_info=Sample.PrefixCacheInfo(5, 6))
    sample.turns = [{"tool": "search"}]
    data = json.loads(json.dumps(sample.to_dict()))
    assert data["turns"] == [{"tool": "search"}] and data["spec_info"]["spec_draft_token_num"] == 2
    again = Sample.from_dict(data)
    assert again.turns == sample.turns and again == sample
    assert again.prefix_cache_info.total_prompt_tokens == 6
    assert Sample.from_dict({"spec_info": {"spec_verify_ct": 9}}).spec_info == Sample.SpecInfo(
        spec_verify_ct=9
    )
    sample.lock = threading.Lock()  # a value that nothing can copy
    assert sample.to_dict()["lock"] is sample.lock
    counts = {"spec_verify_ct": 1, "of_a_newer_version": 2}
    assert Sample.from_dict({"spec_info": counts}).spec_info == Sample.SpecInfo(spec_verify_ct=1)
