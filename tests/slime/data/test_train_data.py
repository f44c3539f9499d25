"""Converts samples to each rank's columns, compared with numbers by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from train_data_cases import border, four, sample

from slime.data.packing import Schedule
from slime.data.train_data import (
    convert_samples_to_train_data,
    make_rank_data,
    post_process_rewards,
    split_by_dp,
)
from slime.types import Sample

HF_CONFIG = {
    "model_type": "qwen2",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 32,
}


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        # The std of (1, 0) is sqrt(1/2), and of (3, 5) it is sqrt(2): both give +-1/sqrt(2).
        ({}, [0.707106, -0.707106, -0.707106, 0.707106]),
        ({"advantage_estimator": "gspo"}, [0.707106, -0.707106, -0.707106, 0.707106]),
        ({"advantage_estimator": "cispo"}, [0.707106, -0.707106, -0.707106, 0.707106]),
        ({"disable_grpo_std_normalization": True}, [0.5, -0.5, -1.0, 1.0]),
        ({"advantage_estimator": "reinforce_plus_plus_baseline"}, [0.5, -0.5, -1.0, 1.0]),
        ({"advantage_estimator": "reinforce_plus_plus"}, [1.0, 0.0, 3.0, 5.0]),
        ({"disable_rewards_normalization": True}, [1.0, 0.0, 3.0, 5.0]),
    ],
)
def test_rewards_by_estimator(flags, wanted):
    raw, rewards = post_process_rewards(*border(**flags), four())
    assert raw == [1.0, 0.0, 3.0, 5.0]
    assert rewards == pytest.approx(wanted, abs=2e-6)


def test_siblings_count_once_in_the_group():
    """The rewards of the rollouts are 1 and mean(0, 1) = 0.5: mean 0.75, std 0.353553."""
    samples = [
        sample(0, 5, 1.0),
        sample(1, 5, 0.0, rollout_id=9),
        sample(2, 5, 1.0, rollout_id=9),
    ]
    _, rewards = post_process_rewards(*border(), samples)
    assert rewards == pytest.approx([0.25 / 0.353554, -0.75 / 0.353554, 0.25 / 0.353554], abs=1e-5)


def test_one_sample_a_prompt_is_only_centred():
    _, rewards = post_process_rewards(*border(), [sample(0, 0, 2.0), sample(1, 1, 4.0)])
    assert rewards == [0.0, 0.0]


def test_rewards_by_key_and_faults():
    samples = [sample(0, 0, {"acc": 1.0, "x": 9.0}), sample(1, 0, {"acc": 0.0, "x": 9.0})]
    raw, _ = post_process_rewards(*border(reward_key="acc"), samples)
    assert raw == [1.0, 0.0]
    with pytest.raises(ValueError, match="group_index must be set on every sample, got None for sample 1"):
        post_process_rewards(*border(), [sample(0, 0, 1.0), sample(1, None, 1.0)])
    with pytest.raises(ValueError, match="reward must be set before training, got None for sample 3"):
        convert_samples_to_train_data(*border(), [sample(3, 0, None)])


def rank_rewards(args, samples):
    return [s.reward for s in samples], [float(s.index) for s in samples]


def test_custom_reward_post_process():
    given = border(custom_reward_post_process_path="test_train_data.rank_rewards")
    data = convert_samples_to_train_data(*given, four())
    assert (data["raw_reward"], data["rewards"]) == ([1.0, 0.0, 3.0, 5.0], [0.0, 1.0, 2.0, 3.0])


def test_columns():
    samples = [
        sample(4, 0, 1.0, response=3, loss_mask=[1, 0, 1], prompt="p", metadata={"k": 1}),
        sample(5, 0, 0.0, response=2, status=Sample.Status.TRUNCATED),
        sample(6, 1, 1.0, response=1, rollout_id=40),
        sample(7, 1, 0.0, response=2, rollout_id=40, loss_mask=[1, 1]),
        sample(8, 1, 0.0, response=2, remove_sample=True),
    ]
    data = convert_samples_to_train_data(*border(), samples)
    assert data["tokens"][0] == [4, 1, 2, 3, 4]
    assert data["loss_masks"] == [[1, 0, 1], [1, 1], [1], [1, 1], [0, 0]]
    assert data["rollout_mask_sums"] == [2.0, 2.0, 3.0, 3.0, 0.0]  # the siblings' masks add up
    assert data["rollout_ids"] == [0, 1, 2, 2, 3]
    assert data["response_lengths"] == [3, 2, 1, 2, 2] and data["total_lengths"] == [5, 4, 3, 4, 4]
    assert data["truncated"] == [0, 1, 0, 0, 0] and data["sample_indices"] == [4, 5, 6, 7, 8]
    assert data["prompt"][0] == "p" and data["metadata"][0] == {"k": 1}
    assert data["rollout_log_probs"][0] == [-0.5] * 3
    assert "teacher_log_probs" not in data
    assert samples[4].loss_mask is None  # the samples do not change


def test_conversion_checks_every_sample():
    samples = four()
    samples[2].rollout_log_probs = None
    with pytest.raises(
        ValueError, match="rollout_log_probs must .* got none for 2 tokens of sample 2 of group 1"
    ):
        convert_samples_to_train_data(*border(), samples)
    samples = four()
    samples[0].teacher_log_probs = [-1.0, -1.0]
    with pytest.raises(ValueError, match="teacher_log_probs must be set on all samples or none, got 1 of 4"):
        convert_samples_to_train_data(*border(), samples)


def test_sft_needs_neither_rewards_nor_log_probs():
    samples = [sample(i, i, None, rollout_log_probs=None) for i in range(2)]
    data = convert_samples_to_train_data(*border(loss_type="sft_loss"), samples)
    assert data["rewards"] == data["raw_reward"] == [0.0, 0.0]
    assert "rollout_log_probs" not in data


def test_split_gives_each_rank_its_tensors():
    samples = [sample(i, i // 2, float(i), response=i + 1) for i in range(4)]
    samples[3].remove_sample = True
    data = convert_samples_to_train_data(*border(), samples)
    # In two steps, rank 0 trains samples 1 and 3, and rank 1 trains samples 0 and 2.
    schedule = Schedule([[[[1]], [[3]]], [[[0]], [[2]]]], [[0, 1], [2, 3]], [2, 2])
    first, second = split_by_dp(data, schedule)
    assert (first["partition"], second["partition"]) == ([1, 3], [0, 2])
    assert [t.tolist() for t in first["tokens"]] == [samples[1].tokens, samples[3].tokens]
    dtypes = {name: first[name][0].dtype for name in ("tokens", "loss_masks", "rollout_log_probs")}
    assert dtypes == {"tokens": torch.int64, "loss_masks": torch.int32, "rollout_log_probs": torch.float32}
    assert first["loss_masks"][1].tolist() == [0] * 4
    assert first["raw_reward"] == [1.0, 3.0] and second["sample_indices"] == [0, 2]
    assert first["micro_batch_indices"] == second["micro_batch_indices"] == [[0], [1]]
    assert first["num_microbatches"] == [1, 1] and first["global_batch_sizes"] == [2, 2]
    # The sample lengths are 1 + 2, then 3 and a removed sample that still counts as one token.
    assert first["global_token_counts"] == second["global_token_counts"] == [3, 4]


@pytest.mark.parametrize(
    "kind", [tuple, np.array, torch.tensor, lambda x: torch.tensor(x, dtype=torch.bfloat16)]
)
def test_hooks_may_keep_their_numbers_in_anything(kind):
    data = convert_samples_to_train_data(*border(), four())
    schedule = Schedule([[[[2, 0], [3]], [[1]]]], [[0, 2, 3], [1]], [3, 1])
    (expected,) = split_by_dp(data, schedule)
    for column, typed in (("loss_masks", kind), ("rollout_log_probs", kind)):
        data[column] = [typed([float(x) for x in values]) for values in data[column]]
    (actual,) = split_by_dp(data, schedule)
    for column in ("loss_masks", "rollout_log_probs"):
        assert [t.dtype for t in actual[column]] == [t.dtype for t in expected[column]]
        assert [t.tolist() for t in actual[column]] == [t.tolist() for t in expected[column]]
    assert actual["global_token_counts"] == expected["global_token_counts"] == [6, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_tokens_are_counted_beyond_what_a_narrow_mask_can_say(dtype):
    data = convert_samples_to_train_data(*border(), [sample(0, 0, 1.0, response=5000)])
    data["loss_masks"] = [torch.ones(5000, dtype=dtype)]
    (only,) = split_by_dp(data, Schedule([[[[0]]]], [[0]], [1]))
    assert only["global_token_counts"] == [5000]


@pytest.mark.parametrize("wrong", [[-0.5, None], None, ["-0.5", "-1"], [[-0.5], [-1.0]]])
def test_what_are_no_numbers_is_refused(wrong):
    data = convert_samples_to_train_data(*border(), [sample(i, 0, float(i)) for i in range(2)])
    data["rollout_log_probs"][1] = wrong
    with pytest.raises(ValueError, match=r"rollout_log_probs must be a list of numbers .* at index 1"):
        split_by_dp(data, Schedule([[[[0, 1]]]], [[0, 1]], [2]))


def test_micro_batches_count_within_the_rank():
    data = convert_samples_to_train_data(*border(), four())
    (only,) = split_by_dp(data, Schedule([[[[2, 0], [3]], [[1]]]], [[0, 2, 3], [1]], [3, 1]))
    assert only["partition"] == [2, 0, 3, 1]
    assert only["micro_batch_indices"] == [[0, 1], [2], [3]] and only["num_microbatches"] == [2, 1]


def test_rank_data_end_to_end():
    """Two ranks have one step with 4 samples, taken by stride, in micro-batches of one sample."""
    ranks = make_rank_data(*border(), four(), 2, HF_CONFIG)
    assert [r["partition"] for r in ranks] == [[0, 2], [1, 3]]
    assert [r["num_microbatches"] for r in ranks] == [[2], [2]]
    assert ranks[0]["global_batch_sizes"] == [4]
    assert ranks[1]["rewards"] == pytest.approx([-0.707106, 0.707106], abs=2e-6)


def own_columns(args, samples):
    return {
        "tokens": [s.tokens for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "rewards": [2.0] * len(samples),
        "loss_masks": [[1] * s.response_length for s in samples],
        "rollout_ids": list(range(len(samples))),
        "rollout_mask_sums": [2.0] * len(samples),
        "source_names": [f"source {s.index}" for s in samples],
    }


def test_custom_conversion():
    given = border(custom_convert_samples_to_train_data_path="test_train_data.own_columns")
    ranks = make_rank_data(*given, four(), 2, HF_CONFIG)
    assert ranks[1]["source_names"] == ["source 1", "source 3"]
    assert ranks[0]["total_lengths"] == [4, 4] and ranks[0]["rewards"] == [2.0, 2.0]
    assert "rollout_log_probs" not in ranks[0]
