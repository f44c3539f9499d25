"""Tests the records of turns that slime's plug-ins use, by hand-made tokens."""

from __future__ import annotations

import pytest
from rollout_double import make_tokenizer

from slime.agent.trajectory import (
    TokenSegment,
    TrajectoryManager,
    TurnRecord,
    fan_out_sample_segments,
    make_turn_segment,
    merge_turn_segments,
    merge_turns,
)
from slime.types import Sample


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def turn(prompt, output, reason="stop", **more):
    return TurnRecord(list(prompt), list(output), reason, [-0.1 * token for token in output], **more)


def record(manager, *turns):
    for asked, answer, tokens in turns:
        manager.record_turn("s", turn=tokens, prompt_messages=asked, response_message=answer)


def made(manager, **more):
    base = Sample(prompt="p", label="l", index=4, group_index=2, session_id="rollout/4", metadata={"task": 1})
    return manager.get_trajectory("s", base_sample=base, reward=0.5, **more)


def test_turns_that_continue_each_other_are_one_sample():
    manager = TrajectoryManager()
    asked, again = [user("a")], [user("a"), said("b", tool_calls=[{}]), user("c")]
    record(
        manager,
        (asked, said("b", tool_calls=[{}]), turn([1, 2], [3, 4])),
        (again, said("d"), turn([1, 2, 3, 4, 5], [6], "length", ill_formed=True)),
    )
    assert manager.has_session("s") and manager.turn_count("s") == 2
    (sample,) = made(manager, extra_metadata={"x": 1})
    assert (sample.tokens, sample.response_length) == ([1, 2, 3, 4, 5, 6], 4)
    assert sample.loss_mask == [1, 1, 0, 1]
    assert sample.rollout_log_probs == pytest.approx([-0.3, -0.4, 0.0, -0.6])
    assert (sample.reward, sample.label, sample.session_id, sample.rollout_id) == (0.5, "l", "rollout/4", 4)
    assert sample.metadata == {"task": 1, "x": 1, "truncated": True, "use_tool": True, "ill_formed": True}
    assert sample.status is Sample.Status.TRUNCATED
    sample.check()
    assert not manager.has_session("s") and made(manager) == []


def test_branches_train_on_a_shared_answer_once():
    manager = TrajectoryManager()
    first = [user("a"), said("b")]
    record(
        manager,
        ([user("a")], said("b"), turn([1], [2])),
        ([*first, user("c")], said("d"), turn([1, 2, 3], [4])),
        ([*first, user("e")], said("f"), turn([1, 2, 5], [6])),
    )
    one, other = made(manager)
    assert (one.tokens, one.loss_mask) == ([1, 2, 3, 4], [1, 0, 1])
    assert (other.tokens, other.loss_mask) == ([1, 2, 5, 6], [0, 0, 1])
    assert other.rollout_log_probs == pytest.approx([0.0, 0.0, -0.6])
    assert one.rollout_id == other.rollout_id == 4


@pytest.mark.parametrize(("threshold", "samples"), [(None, 1), (0, 2)])
def test_an_answer_that_the_template_renders_with_other_tokens(threshold, samples):
    """Below the threshold the changed answer becomes context. With 0, the next answer starts a new sample."""
    manager = TrajectoryManager(fork_threshold_tokens=threshold)
    record(
        manager,
        ([user("a")], said("b"), turn([1], [2, 3])),
        ([user("a"), said("b"), user("c")], said("d"), turn([1, 2, 9, 5], [6])),
    )
    found = made(manager)
    assert len(found) == samples
    if samples == 1:
        assert (found[0].tokens, found[0].loss_mask) == ([1, 2, 9, 5, 6], [0, 0, 0, 1])
    else:
        assert [sample.tokens for sample in found] == [[1, 2, 3], [1, 2, 9, 5, 6]]
        assert [sample.loss_mask for sample in found] == [[1, 1], [1]]


@pytest.mark.parametrize(("threshold", "samples"), [(None, 1), (0, 2)])
def test_an_answer_that_the_agent_rewrites(threshold, samples):
    manager = TrajectoryManager(fork_threshold_tokens=threshold)
    record(
        manager,
        ([user("a")], said("b"), turn([1], [2, 3])),
        ([user("a"), said("B!"), user("c")], said("d"), turn([1, 7, 5], [6])),
    )
    found = made(manager)
    assert len(found) == samples and found[-1].tokens == [1, 7, 5, 6] and found[-1].loss_mask == [1]


def test_a_long_sample_is_cut_and_a_sample_without_a_trained_token_is_left_out():
    manager = TrajectoryManager()
    record(manager, ([user("a")], said("b"), turn([1], [2, 3, 4])))
    (sample,) = made(manager, max_sample_tokens=3)
    assert sample.tokens == [1, 2, 3] and sample.metadata["truncated"]
    record(manager, ([user("a")], said("b"), turn([1, 2, 3], [4])))
    assert made(manager, max_sample_tokens=3) == []
    manager.drop_session("s")


def test_merged_turns_keep_only_what_later_prompts_repeat():
    whole = merge_turns([turn([1], [2, 3]), turn([1, 2, 3, 4], [5])])
    assert whole == TokenSegment([1], [2, 3, 4, 5], [1, 1, 0, 1], pytest.approx([-0.2, -0.3, 0.0, -0.5]))
    cut = merge_turns([turn([1], [2, 3]), turn([1, 2, 9], [5])])
    assert (cut.response_ids, cut.loss_mask) == ([2, 9, 5], [0, 0, 1])
    skipped = merge_turns([turn([1], [2]), turn([1, 2, 3], [4]), turn([1, 2, 7], [8])])
    assert (skipped.response_ids, skipped.loss_mask) == ([2, 7, 8], [1, 0, 1])
    anew = merge_turns([turn([1, 2], [3]), turn([1, 9], [4])])
    assert (anew.prompt_ids, anew.response_ids) == ([1, 9], [4])
    assert merge_turns([]) is None
    segments = [make_turn_segment([turn([1], [2], "length")], kind="final"), make_turn_segment([])]
    (segment,) = merge_turn_segments(segments)
    assert segment.metadata == {"segment_kind": "final", "finish_reason": "length"}


def test_segments_become_siblings_with_the_whole_reward():
    tokenizer = make_tokenizer()
    segments = [
        TokenSegment([1], tokenizer.encode("ab"), [1, 1], [-1.0, -2.0], {"segment_kind": "wipe"}),
        TokenSegment([1, 2], tokenizer.encode("c"), [1], [-3.0]),
    ]
    sample = Sample(prompt="p", index=3, metadata={"a": 1})
    first, second = fan_out_sample_segments(sample, segments, 1.0, tokenizer, metadata={"b": 2})
    assert first is sample and (first.response, second.response) == ("ab", "c")
    assert (first.reward, second.reward) == (1.0, 1.0) and first.rollout_id == second.rollout_id == 3
    assert first.metadata == {"a": 1, "b": 2, "segment_kind": "wipe", "segment_idx": 0, "num_segments": 2}
    assert second.metadata == {"a": 1, "b": 2, "segment_idx": 1, "num_segments": 2}
    assert second.tokens[:2] == [1, 2] and second.rollout_log_probs == [-3.0]
    for one in (first, second):
        one.check()


def test_values_that_are_missing_or_wrong():
    with pytest.raises(ValueError, match="output_log_probs must have one entry per token .* got 1 for 2"):
        TurnRecord([1], [2, 3], "stop", [-0.1])
    with pytest.raises(ValueError, match="replay must be None"):
        TurnRecord([1], [2], "stop", [-0.1], replay={"rollout_routed_experts": [1]})
    with pytest.raises(ValueError, match="prompt_messages must have a message"):
        TrajectoryManager().record_turn("s", turn=turn([1], [2]), prompt_messages=[], response_message=None)
    manager = TrajectoryManager()
    record(manager, ([user("a")], said("b"), TurnRecord([1], [2], "stop")))
    (sample,) = made(manager)
    with pytest.raises(
        ValueError, match="rollout_log_probs must have one entry per response token, got none"
    ):
        sample.check()
