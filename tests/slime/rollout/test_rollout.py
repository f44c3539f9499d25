"""Tests the rollout loop: filters, refill, abort, partial rollouts, deadlines and the errors that end it."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter

import pytest
from rollout_double import ListSource, make_args, make_state, write_lines

from slime.data.source import PromptDataSource
from slime.rollout import sglang_rollout, vllm_rollout
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn
from slime.rollout.filter_hub.base_types import DynamicFilterOutput, call_dynamic_filter
from slime.rollout.filter_hub.dynamic_sampling_filters import (
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
)
from slime.rollout.state import current_state
from slime.rollout.stream import drops, stream
from slime.tracking.journal import read_events
from slime.types import Sample

STATUS = Sample.Status
FILTERS = "slime.rollout.filter_hub.dynamic_sampling_filters."


def setup(prompts, **flags):
    args = make_args(**{"custom_rm_path": "test_rollout.parity_reward", **flags})
    make_state(args)
    return args, ListSource(args, prompts)


def generate(args, source, rollout_id=0) -> RolloutFnTrainOutput:
    return vllm_rollout.generate_rollout(args, rollout_id, source)


def prompts_of(groups) -> list[str]:
    return [group[0].prompt for group in groups]


async def parity_reward(args, sample):
    """Returns different rewards for odd and even samples, unless the prompt asks for equal rewards."""
    for word, reward in (("easy", 1.0), ("hard", 0.0)):
        if word in sample.prompt:
            return reward
    if "unscorable" in sample.prompt:
        raise KeyError("no answer")
    return float(sample.index % 2)


def test_a_plain_rollout_is_complete_sorted_and_repeatable():
    outputs = []
    for _ in range(2):
        args, source = setup(["a len=5 :", "b len=1 :", "c :"])
        outputs.append(generate(args, source, rollout_id=3))
    groups = outputs[0].samples
    assert prompts_of(groups) == ["a len=5 :", "b len=1 :"]
    assert [[s.reward for s in group] for group in groups] == [[0.0, 1.0], [0.0, 1.0]]
    assert all(s.status is STATUS.COMPLETED for group in groups for s in group)
    assert outputs[0].metrics.keys() == {
        f"perf/request/e2e_latency/{k}" for k in ("mean", "median", "max", "min")
    }  # the double reports no waiting time, and no zero replaces it
    as_dicts = [[[s.to_dict() for s in group] for group in output.samples] for output in outputs]
    assert as_dicts[0] == as_dicts[1]
    assert current_state().engine.aborts == 0 and current_state().progress == (4, 4)
    assert source.drawn == 2
    assert sglang_rollout.generate_rollout is vllm_rollout.generate_rollout


def test_dynamic_filter_drops_counts_and_refills():
    args, source = setup(
        ["easy", "hard", "a", "easy", "b", "c"],
        dynamic_sampling_filter_path=FILTERS + "check_reward_nonzero_std",
    )
    output = generate(args, source)
    assert prompts_of(output.samples) == ["a", "b"]
    drops = {k: v for k, v in output.metrics.items() if "drop" in k}
    assert drops == {
        "rollout/dynamic_filter/drop_zero_std_1.0": 2,
        "rollout/dynamic_filter/drop_zero_std_0.0": 1,
    }
    # 2 are drawn and both dropped -> 2 more, one dropped -> 2 more, and one more is enough.
    assert source.drawn == 6 and output.metrics["rollout/partial/groups_discarded"] == 1


def test_fallback_filter_does_not_draw_again():
    args, source = setup(
        ["easy", "hard", "a", "b"],
        dynamic_sampling_filter_path=FILTERS + "check_reward_nonzero_std_with_fallback",
        over_sampling_batch_size=3,
    )
    output = generate(args, source)
    # One of three groups may be dropped: "easy" is dropped, then "hard" is needed.
    assert prompts_of(output.samples) == ["hard", "a"] and source.drawn == 3
    assert output.metrics["rollout/dynamic_filter/drop_zero_std_1.0"] == 1


def test_built_in_filters_by_hand():
    args = make_args(reward_key="score")

    def group(*rewards):
        return [Sample(reward={"score": r}) for r in rewards]

    assert check_reward_nonzero_std(args, group(0, 1)).keep
    assert check_reward_nonzero_std(args, group(0.5, 0.5 + 1e-7)) == DynamicFilterOutput(
        False, "zero_std_0.5"
    )
    assert not check_reward_nonzero_std(args, group(1)).keep
    fallback = check_reward_nonzero_std_with_fallback(args, group(1, 1))
    assert fallback == DynamicFilterOutput(False, "zero_std_1.0", keep_when_insufficient=True)


def test_filters_may_return_bool_and_nothing_else():
    assert call_dynamic_filter(None, None, []).keep
    assert call_dynamic_filter(lambda args, group: 0, None, []) == DynamicFilterOutput(keep=False)
    with pytest.raises(ValueError, match=r"--dynamic-sampling-filter-path must return .* got NoneType"):
        call_dynamic_filter(lambda args, group: None, None, [])


def refuse_all(args, samples, **kwargs):
    return False


def test_a_filter_that_drops_everything_is_an_error(monkeypatch):
    monkeypatch.setattr(drops, "MAX_BARREN_BATCHES", 3)
    args, source = setup(["a"] * 100, dynamic_sampling_filter_path="test_rollout.refuse_all")
    with pytest.raises(
        RuntimeError,
        match=r"--dynamic-sampling-filter-path must keep some groups, got none in 6 in a row \(filtered: 6",
    ):
        generate(args, source)
    args, source = setup(["easy"] * 3, dynamic_sampling_filter_path="test_rollout.refuse_all")
    with pytest.raises(
        ValueError, match=r"--data-source-path must return groups .* return groups until the run ends"
    ):
        generate(args, source)


@pytest.mark.parametrize(("dropped", "states"), [(5, []), (6, ["begin", "end"]), (9, ["begin", "end"])])
def test_three_batches_of_dropped_groups_are_recorded(tmp_path, monkeypatch, dropped, states):
    """The record comes before the dropped groups end the run, because 32 batches may take hours."""
    left = iter([False] * dropped)
    monkeypatch.setattr(sys.modules[__name__], "refuse_all", lambda args, samples, **kwargs: next(left, True))
    flags = {"dynamic_sampling_filter_path": "test_rollout.refuse_all", "run_dir": str(tmp_path)}
    args, source = setup(["a"] * 100, **flags)
    generate(args, source)
    current_state().events.close()
    found = list(read_events(tmp_path, kinds=("concern_begin", "concern_end")))
    assert [event.kind.removeprefix("concern_") for event in found] == states
    assert all(event["name"] == "all groups dropped" and event.source == "rollout" for event in found)


def test_an_error_cancels_what_runs_and_the_next_rollout_works():
    args, source = setup(["slow", "unscorable"])
    with pytest.raises(RuntimeError, match="sample 2 of group 1"):
        generate(args, source)
    assert current_state().engine.running == 0
    source.prompts += ["a", "b"]
    assert prompts_of(generate(args, source).samples) == ["a", "b"]


def test_stragglers_are_aborted_and_discarded():
    args, source = setup(["a", "slow :", "b"], over_sampling_batch_size=3)
    output = generate(args, source)
    assert prompts_of(output.samples) == ["a", "b"]
    assert source.buffer == [] and output.metrics["rollout/partial/groups_discarded"] == 1
    assert current_state().engine.aborts == 1


def test_partial_rollout_continues_in_the_next_rollout():
    args, source = setup(["a", "slow len=4 :", "b", "c"], over_sampling_batch_size=3, partial_rollout=True)
    current_state().engine.version = 5
    output = generate(args, source, rollout_id=5)
    assert prompts_of(output.samples) == ["a", "b"] and output.metrics["rollout/partial/groups_put_back"] == 1
    (group,) = source.buffer
    assert [(s.response, s.status, s.reward) for s in group] == [("ab", STATUS.ABORTED, None)] * 2
    assert group[0].metadata["start_rollout_id"] == 5

    current_state().engine.version = 6
    args.over_sampling_batch_size = 2
    output = generate(args, source, rollout_id=6)
    assert prompts_of(output.samples) == ["slow len=4 :", "c"]
    for sample in output.samples[0]:
        assert (sample.response, sample.weight_versions) == ("abcd<|im_end|>", [5, 6])
        assert sample.columns["token_versions"] == [5, 5, 6, 6, 6]
        assert sample.session_id == f"rollout/{sample.index}"
        sample.check()
    ages = {name.removeprefix("rollout/staleness/"): value for name, value in output.metrics.items()}
    assert (ages["mean"], ages["max"], ages["over_limit"], ages["token_mean"]) == (0.5, 1, 0, 2 / 9)


def test_tokens_of_a_partial_rollout_beyond_its_limit_are_counted_and_masked():
    """The group was cut off two rollouts ago, and two of its five tokens are older than one rollout."""
    args, source = setup(["a", "slow len=4 :", "b"], over_sampling_batch_size=3, partial_rollout=True)
    args.stale_samples = "mask"
    generate(args, source, rollout_id=0)
    source.prompts += ["c"]
    args.over_sampling_batch_size, current_state().engine.version = 2, 2
    output = generate(args, source, rollout_id=2)
    assert prompts_of(output.samples) == ["slow len=4 :", "c"]
    assert [s.loss_mask for s in output.samples[0]] == [[0, 0, 1, 1, 1]] * 2
    assert output.metrics["rollout/staleness/over_limit"] == 2
    assert output.metrics["rollout/staleness/token_over_limit_frac"] == 2 / 9


def test_a_waiting_sample_is_not_started_after_the_abort():
    args, source = setup(
        ["a", "b", "slow", "d"], over_sampling_batch_size=4, partial_rollout=True, server_concurrency=6
    )
    generate(args, source)
    assert prompts_of(source.buffer) == ["slow", "d"]
    assert {s.response for s in source.buffer[1]} in ({""}, {"abc<|im_end|>"})


def test_surplus_groups_return_finished_until_they_are_stale():
    args, source = setup(["a", "b", "c"], over_sampling_batch_size=3, partial_rollout=True)
    generate(args, source, rollout_id=0)
    (group,) = source.buffer
    assert [s.status for s in group] == [STATUS.COMPLETED] * 2 and group[0].reward == 0.0
    calls = len(current_state().engine.calls)
    source.prompts += ["d", "e", "f"]
    args.over_sampling_batch_size = 2
    output = generate(args, source, rollout_id=1)
    assert prompts_of(output.samples) == ["c", "d"]
    assert len(current_state().engine.calls) == calls + 2  # only "d" was generated

    group[0].metadata["start_rollout_id"] = 0
    source.add_samples([group])
    output = generate(
        args, source, rollout_id=2
    )  # two rollouts old, --max-staleness 0 and one for the carry-over
    assert (
        prompts_of(output.samples) == ["e", "f"] and output.metrics["rollout/dynamic_filter/drop_stale"] == 1
    )
    source.add_samples([group])
    source.prompts += ["g"]
    args.max_staleness = 3
    assert prompts_of(generate(args, source, rollout_id=3).samples) == ["c", "g"]


def test_late_groups_are_replaced_and_counted():
    args, source = setup(["stuck", "a", "b", "c"], rollout_deadline_s=0.1, partial_rollout=True)
    output = generate(args, source)
    assert prompts_of(output.samples) == ["a", "b"]
    assert "stuck" not in prompts_of(source.buffer)  # it would be late again
    assert output.metrics["rollout/dynamic_filter/drop_deadline"] == 1


def test_when_everything_is_late_the_rollout_ends():
    args, source = setup(["late"] * 20)
    with pytest.raises(
        TimeoutError,
        match=r"--rollout-deadline-s must suffice .* got 5.0 s and 8 groups in a row.*connection refused",
    ):
        generate(args, source)


async def never_ends(args, sample, sampling_params):
    if "deaf" in sample.prompt:
        await asyncio.Event().wait()
    return await vllm_rollout_generate(args, sample, sampling_params)


async def vllm_rollout_generate(args, sample, sampling_params):
    from slime.rollout.generate import generate

    return await generate(args, sample, sampling_params)


def test_a_generate_function_that_ignores_the_abort_is_cancelled(monkeypatch):
    monkeypatch.setattr(stream, "_ABORT_EVERY_S", 0.05)
    args, source = setup(
        ["deaf", "a", "b"],
        custom_generate_function_path="test_rollout.never_ends",
        over_sampling_batch_size=3,
        partial_rollout=True,
        rollout_deadline_s=0.2,
    )
    output = generate(args, source)
    assert prompts_of(output.samples) == ["a", "b"] and prompts_of(source.buffer) == ["deaf"]
    assert current_state().engine.aborts >= 2  # repeated, for functions that send one request after another


async def split(args, sample, sampling_params):
    import copy

    return [await vllm_rollout_generate(args, copy.deepcopy(sample), sampling_params) for _ in range(2)]


def test_fanned_out_groups_return_to_the_buffer_as_prompts():
    args, source = setup(
        ["a", "b", "slow :"],
        custom_generate_function_path="test_rollout.split",
        custom_rm_path="test_rollout.group_of_ones",
        over_sampling_batch_size=3,
        partial_rollout=True,
    )
    output = generate(args, source)
    assert [len(group) for group in output.samples] == [4, 4]
    (group,) = source.buffer
    assert [(s.prompt, s.index, s.status, s.tokens) for s in group] == [
        ("slow :", 4, STATUS.PENDING, []),
        ("slow :", 5, STATUS.PENDING, []),
    ]


async def group_of_ones(args, samples):
    return [1.0] * len(samples)


SEEN: list = []


def drop_first(args, groups):
    groups[0][0].remove_sample = True


def look_at_all(args, all_samples, data_source):
    SEEN.append((prompts_of(all_samples), data_source))


def test_batch_hooks():
    SEEN.clear()
    args, source = setup(
        ["easy", "a", "b"],
        dynamic_sampling_filter_path=FILTERS + "check_reward_nonzero_std",
        rollout_sample_filter_path="test_rollout.drop_first",
        rollout_all_samples_process_path="test_rollout.look_at_all",
        over_sampling_batch_size=3,
    )
    output = generate(args, source)
    assert output.samples[0][0].remove_sample and not output.samples[0][1].remove_sample
    assert [(["easy", "a", "b"], source)] == SEEN


def test_partial_samples_survive_a_restart(tmp_path):
    """A rollout with a straggler is saved, and a new process continues the straggler with the same seed and tokens."""
    data = write_lines(tmp_path / "d.jsonl", [{"prompt": p} for p in ("a", "slow len=4 :", "b", "c")])
    flags = {"prompt_data": data, "save": str(tmp_path), "load": str(tmp_path), "partial_rollout": True}
    outputs = []
    for restart in (False, True):
        args, _ = setup([], over_sampling_batch_size=3, **flags)
        source = PromptDataSource(args)
        generate(args, source, rollout_id=0)
        source.save(0)
        if restart:
            args, _ = setup([], **flags)
            source = PromptDataSource(args)
            source.load(0)
        args.over_sampling_batch_size = 2
        outputs.append(
            [[s.to_dict() for s in group] for group in generate(args, source, rollout_id=1).samples]
        )
    assert outputs[0] == outputs[1]
    assert [group[0]["prompt"] for group in outputs[0]] == ["slow len=4 :", "c"]
    assert Counter(s["response"] for s in outputs[0][0]) == {"abcd<|im_end|>": 2}


def test_call_rollout_fn_wraps_old_results():
    assert call_rollout_fn(lambda evaluation: [[]], evaluation=False) == RolloutFnTrainOutput([[]])
    assert call_rollout_fn(lambda evaluation: {"a": {}}, evaluation=True) == RolloutFnEvalOutput({"a": {}})
    done = RolloutFnTrainOutput([], {"x": 1})
    assert call_rollout_fn(lambda evaluation: done, evaluation=False) is done
    with pytest.raises(ValueError, match="--eval-function-path must return RolloutFnEvalOutput, got list"):
        call_rollout_fn(lambda evaluation: [], evaluation=True)
