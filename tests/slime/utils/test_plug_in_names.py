"""Tests names, keywords and defaults on which slime's plug-ins rely, tested by their behaviour."""

from __future__ import annotations

import asyncio
import copy
import pickle
import random
import socket
from types import SimpleNamespace

import pytest
import torch
from rollout_double import ListSource, make_args, make_state, make_tokenizer, write_lines

from slime.config import Config, read_section
from slime.config.sections.rollout import RolloutConfig
from slime.ray.rollout import (
    compute_metrics_from_samples,
    compute_pass_rate,
    compute_perf_metrics_from_samples,
    compute_rollout_step,
    compute_statistics,
    dict_add_prefix,
    has_repetition,
)
from slime.rollout import generate, sglang_rollout, vllm_rollout
from slime.rollout.data_source import DataSource, RolloutDataSourceWithBuffer
from slime.rollout.eval_datasets import build_eval_dataset_configs
from slime.rollout.evaluation import _sampling_params
from slime.rollout.filter_hub.base_types import DynamicFilterOutput, should_drop_dynamic_filter_output
from slime.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std
from slime.rollout.rewards.deepscaler import deepscaler_reward
from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.gpqa import DEFAULT_VALID_LETTERS, compute_gpqa_reward
from slime.rollout.sample_hooks import apply_rollout_sample_hooks
from slime.types import Sample
from slime.utils.data import Dataset, _parse_generalized_path
from slime.utils.http_utils import get_host_info
from slime.utils.mask_utils import get_response_lengths
from slime.utils.misc import group_by
from slime.utils.ppo_utils import chunked_discounted_returns, get_reinforce_plus_plus_returns
from slime.utils.processing_utils import load_processor


@pytest.mark.parametrize(
    ("keep", "fallback", "left", "dropped"),
    [(True, False, 9, False), (False, False, 1, True), (False, True, 3, True), (False, True, 2, False)],
)
def test_a_rejected_group_stays_only_where_it_is_needed(keep, fallback, left, dropped):
    output = DynamicFilterOutput(keep, keep_when_insufficient=fallback)
    assert should_drop_dynamic_filter_output(output, left, target_data_size=2) is dropped


def test_the_filter_takes_trajectories_in_parts():
    def group(*rewards):
        return [[Sample(reward=r), Sample(reward=r)] for r in rewards]

    args = SimpleNamespace()
    assert check_reward_nonzero_std(args, group(0.0, 1.0)).keep
    assert check_reward_nonzero_std(args, group(0.5, 0.5)) == DynamicFilterOutput(False, "zero_std_0.5")


def test_discounted_returns_by_hand():
    rewards = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64)
    returns = chunked_discounted_returns(rewards, 0.5)
    assert returns.tolist() == [[3.0, 4.0, 4.0]] and returns.dtype == torch.float64
    assert rewards.tolist() == [[1.0, 2.0, 4.0]]  # they keep their values
    assert chunked_discounted_returns(rewards.bfloat16(), 0.5).dtype == torch.bfloat16
    (found,) = get_reinforce_plus_plus_returns(
        torch.tensor([2.0]),
        [torch.tensor([1.0, 1.0, 8.0])],
        [torch.tensor([1.0, 1.0, 0.0])],
        [3],
        [5],
        0.5,
        0.5,
    )
    assert found.tolist() == [0.25, 1.5, 0.0]  # the reward at the last trained token, -0.5 per trained token


def test_small_helpers_of_rewards_and_files():
    assert "".join(DEFAULT_VALID_LETTERS) == "ABCDEFGHIJ" and compute_gpqa_reward(None, "A") == 0.0
    assert get_deepscaler_rule_based_reward(r"</think>\boxed{4}", "") == 0.0
    with pytest.raises(ValueError, match="label must hold an answer, got ''"):
        deepscaler_reward(r"</think>\boxed{4}", "", {})
    assert _parse_generalized_path("a.jsonl@[-3:]") == ("a.jsonl", slice(-3, None))
    assert _parse_generalized_path("a.jsonl") == ("a.jsonl", None)


def note(args, sample, *, mine, evaluation):
    sample.metadata["seen"] = (mine, evaluation)


def wrong(args, sample):
    return 3


def test_hooks_get_other_keywords_and_lists_keep_their_shape():
    args = SimpleNamespace(rollout_sample_hook_path=["test_plug_in_names.note"])
    groups = [[Sample(index=0)], [Sample(index=1), Sample(index=2)]]
    found = asyncio.run(apply_rollout_sample_hooks(args, groups, evaluation=True, mine=5, other=6))
    assert [[s.index for s in group] for group in found] == [[0], [1, 2]]
    assert all(s.metadata["seen"] == (5, True) for group in found for s in group)
    args.rollout_sample_hook_path = ["test_plug_in_names.wrong"]
    with pytest.raises(TypeError, match="must return a sample, got int"):
        asyncio.run(apply_rollout_sample_hooks(args, groups))
    assert asyncio.run(apply_rollout_sample_hooks(SimpleNamespace(), groups)) == groups  # there are no hooks


async def length_reward(args, sample, **kwargs):
    return float(sample.response_length)


def test_a_function_that_is_replaced_is_the_one_that_runs(monkeypatch):
    """slime's plug-ins and their tests replace it on the module under slime's name."""
    args = make_args(custom_rm_path="test_plug_in_names.length_reward")
    state = make_state(args)

    async def mine(args, sample, sampling_params):
        sample.tokens, sample.response_length, sample.response = [1, 2], 1, "mine"
        sample.rollout_log_probs, sample.status = [-0.5], Sample.Status.COMPLETED
        return sample

    own = generate.generate
    monkeypatch.setattr(sglang_rollout, "generate", mine)
    output = sglang_rollout.generate_rollout(args, 0, ListSource(args, ["q", "r"]))
    assert [s.response for group in output.samples for s in group] == ["mine"] * 4 and not state.engine.calls
    monkeypatch.undo()
    assert generate.generate is own and vllm_rollout.generate is own


async def custom(args, sample, sampling_params):
    sample.response, sample.status, sample.reward = "custom", Sample.Status.COMPLETED, 1.0
    return sample


def test_arguments_of_a_plug_in_get_the_defaults_of_flags():
    make_state(make_args())  # the run's own state, which `args` below do not have
    args = SimpleNamespace(custom_generate_function_path="test_plug_in_names.custom")
    sample = asyncio.run(sglang_rollout.generate_and_rm(args, Sample(prompt="q"), {}, evaluation=True))
    assert (sample.response, sample.reward) == ("custom", 1.0) and vars(args).keys() == {
        "custom_generate_function_path"
    }
    plain = asyncio.run(
        sglang_rollout.generate(SimpleNamespace(), Sample(prompt="q", index=0), {"max_new_tokens": 8})
    )
    assert plain.status is Sample.Status.COMPLETED and plain.response.startswith("abc")
    args = SimpleNamespace(rollout_seed=7)
    flags = read_section(RolloutConfig, args)
    assert (flags.rollout_seed, flags.rollout_deadline_s) == (7, 600.0)
    flags.rollout_sample_hook_path.append("x")
    # Two objects do not share a default.
    assert read_section(RolloutConfig, args).rollout_sample_hook_path == []
    config = Config.from_args(args)
    assert (config.rollout.rollout_seed, config.data.rollout_batch_size) == (7, None)


def test_other_keys_of_an_evaluation_dataset_reach_it():
    entries = [{"name": "a", "path": "x.jsonl", "app": "mine"}, {"name": "b", "path": "y.jsonl"}]
    args = SimpleNamespace(rollout_temperature=0.5)
    first, second = build_eval_dataset_configs(args, entries, {"repetition_penalty": 1.05, "task_timeout": 9})
    assert (first.app, first.task_timeout, first.repetition_penalty, first.temperature) == (
        "mine",
        9,
        1.05,
        0.5,
    )
    assert second.extra == {"repetition_penalty": 1.05, "task_timeout": 9}
    assert copy.deepcopy(first) == pickle.loads(pickle.dumps(first)) == first
    with pytest.raises(AttributeError, match="no setting 'app'"):
        _ = second.app
    params = _sampling_params(make_args(), first)
    assert params["repetition_penalty"] == 1.05 and "app" not in params and "task_timeout" not in params
    with pytest.raises(ValueError, match="known settings, got 'temperture'; did you mean temperature"):
        build_eval_dataset_configs(args, entries, {"temperture": 0.7})


def test_metrics_by_hand():
    assert dict_add_prefix({"a": 1, "b": [2]}, "x/") == {"x/a": 1, "x/b": [2]}
    assert compute_statistics([1, 4, 1]) == {"mean": 2.0, "median": 1, "max": 4, "min": 1}
    assert compute_pass_rate([1, 0, 0, 0, 0, 0], 2) == {"pass@1": pytest.approx(1 / 6), "pass@2": 1 / 3}
    assert compute_pass_rate([1, 0], 1) == {}
    with pytest.raises(ValueError, match="whole groups of 2, got 3 rewards; group the samples"):
        compute_pass_rate([1, 0, 0], 2)
    with pytest.raises(ValueError, match="whole groups of 2, got 4 rewards for 3 groups"):
        compute_pass_rate([1, 0, 0, 0], 2, num_groups=3)
    assert has_repetition("ab" * 60) and not has_repetition("ab")
    # Only the tracker of W&B converts steps.
    assert compute_rollout_step(SimpleNamespace(wandb_always_use_train_step=True), 3) == 3
    assert group_by("abca") == {"a": ["a", "a"], "b": ["b"], "c": ["c"]}
    assert group_by([1, 2, 3], lambda x: x % 2) == {1: [1, 3], 0: [2]}
    assert get_response_lengths([[0, 0, 1, 0, 1], [0], []]) == [3, 0, 0]


def test_metrics_of_samples_for_any_args():
    samples = [
        Sample(group_index=i // 2, response="ab", response_length=2 + i, reward={"score": float(i == 3)})
        for i in range(4)
    ]
    args = SimpleNamespace(reward_key="score", rollout_num_gpus=2)
    found = compute_metrics_from_samples(args, samples)
    assert found["response_len/mean"] == 3.5 and found["zero_std/count_0.0"] == 1
    assert found["truncated_ratio"] == found["repetition_frac"] == 0
    perf = compute_perf_metrics_from_samples(args, samples, 2.0)
    assert perf["rollout_time"] == 2.0 and perf["tokens_per_gpu_per_sec"] == 14 / 2 / 2
    assert perf["longest_sample_tokens_per_sec"] == 2.5
    for compute in (
        lambda: compute_metrics_from_samples(args, []),
        lambda: compute_perf_metrics_from_samples(args, [], 2.0),
    ):
        with pytest.raises(ValueError, match="samples must hold at least one sample, got none"):
            compute()


class OwnSource(DataSource):
    def get_samples(self, num_groups):
        return [[Sample(index=0)]] * num_groups

    def __len__(self):
        return 3


def test_a_plug_in_derives_its_data_source():
    assert len(OwnSource().get_samples(2)) == 2 and len(OwnSource()) == 3


def test_a_data_set_of_a_plug_in(tmp_path):
    """Plug-ins' data sources and evaluations build it from their args, in the order of --rollout-shuffle."""
    tokenizer = make_tokenizer()
    rows = [
        {"q": [{"role": "user", "content": c * (i + 1)}], "a": c, "m": {"i": i}} for i, c in enumerate("abcd")
    ]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    length = len(tokenizer.apply_chat_template(rows[2]["q"], add_generation_prompt=True)["input_ids"])
    args = Config.from_flat({"prompt_data": path, "rollout_seed": 5}).namespace()
    found = Dataset(
        args.prompt_data,
        tokenizer=tokenizer,
        processor=load_processor(str(tmp_path)),
        max_length=length,
        prompt_key="q",
        multimodal_keys=args.multimodal_keys,
        label_key="a",
        metadata_key="m",
        tool_key=args.tool_key,
        apply_chat_template=True,
        apply_chat_template_kwargs={"x": 1},
        seed=args.rollout_seed,
    )
    first, *_, last = found.origin_samples
    assert (len(found), first.label, last.label) == (3, "a", "c")  # the fourth prompt is too long
    assert last.prompt == "<|im_start|>user\nccc<|im_end|>\n<|im_start|>assistant\n"
    assert (last.metadata, last.apply_chat_template_kwargs) == ({"i": 2}, {"x": 1})
    for epoch in (3, 3, 4):
        found.shuffle(epoch)
        random.Random(5 + epoch).shuffle(order := [0, 1, 2])
        assert [found[i].metadata["i"] for i in range(3)] == order
    plain = Dataset(path, None, None, None, prompt_key="q")
    assert plain[3].prompt == rows[3]["q"] and plain[3].label is None


def test_the_address_of_this_host():
    name, address = get_host_info()
    assert name == socket.gethostname()
    with socket.socket() as server:  # the address is one of this host
        server.bind((address, 0))


def test_a_data_source_saves_the_record_of_a_plug_in(tmp_path):
    """slime's rollout_buffer example stores the groups that it has finished."""
    path = write_lines(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    args = make_args(prompt_data=path, save=str(tmp_path))
    source = RolloutDataSourceWithBuffer(args)
    source.update_metadata({"0": ["x"]})
    source.update_metadata({"1": []})
    source.add_samples(source.get_samples(2)[:1])
    assert source.get_buffer_length() == 1
    source.save(3)
    again = RolloutDataSourceWithBuffer(make_args(prompt_data=path, load=str(tmp_path)))
    assert again.get_metadata() == {}
    again.load(3)
    assert again.get_metadata() == {"0": ["x"], "1": []} and again.get_buffer_length() == 1
