"""Tests metrics of rollouts whose samples fanned out: siblings are one trajectory, with one reward."""

from __future__ import annotations

import numpy as np
import pytest
from rollout_double import make_args, make_state, write_lines

from slime.config import Config
from slime.data.drawing.curriculum import PROMPT, PassRates
from slime.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std
from slime.rollout.metrics import eval_metrics, rollout_metrics
from slime.rollout.vllm_rollout import generate_rollout
from slime.types import Sample

STATUS = Sample.Status


def part(reward, group, rollout=None, *, status=STATUS.COMPLETED, **metadata):
    return Sample(
        reward=reward,
        group_index=group,
        rollout_id=rollout,
        response_length=2,
        loss_mask=[1, 1],
        status=status,
        metadata=metadata,
    )


def fanned_out():
    """Returns two trajectories per group: three samples with reward 1, and one sample with reward 0; and two of 1."""
    mixed = [*(part(1.0, 0, 7, data_source="a") for _ in range(3)), part(0.0, 0, data_source="a")]
    mixed[2].status = STATUS.TRUNCATED
    return [mixed, [part(1.0, 1, 8, data_source="b"), part(1.0, 1, 9, data_source="b")]]


def test_rewards_and_rates_count_trajectories():
    groups = fanned_out()
    flags = {"log_passrate": True, "rollout_num_gpus": 1, "prompt_data": ["a=x", "b=y"]}
    found = rollout_metrics(Config.from_flat(flags), groups, 1.0)
    assert found["rollout/raw_reward"] == 0.75 and found["rollout/raw_reward/a"] == 0.5
    assert (found["rollout/passrate/pass@1"], found["rollout/passrate/pass@2"]) == (0.75, 1.0)
    assert found["rollout/zero_std/count_1.0"] == 1
    assert found["rollout/truncated_ratio"] == 0.25
    alone = rollout_metrics(Config.from_flat(flags | {"prompt_data": None}), groups[:1], 1.0)
    assert alone["rollout/raw_reward"] == 0.5, "0.75 of the samples"


def test_a_trajectory_has_the_mean_of_its_parts():
    """The advantages of the parts use the same mean, so a group of such means has no deviation."""
    parts = [part(1.0, 0, 3), part(0.0, 0, 3), part(0.5, 0, 4)]
    found = rollout_metrics(Config.from_flat({"rollout_num_gpus": 1}), [parts], 1.0)
    assert found["rollout/raw_reward"] == 0.5 and found["rollout/zero_std/count_0.5"] == 1
    assert check_reward_nonzero_std(make_args(), parts).reason == "zero_std_0.5"
    assert check_reward_nonzero_std(make_args(), [*parts, part(1.0, 0)]).keep
    assert not check_reward_nonzero_std(make_args(), parts[:2]).keep, "one trajectory has no deviation"


def test_the_curriculum_counts_trajectories():
    rates = PassRates(1, 0.5, 0)
    rates.observe([[*(part(1.0, 0, 7, **{PROMPT: 0}) for _ in range(3)), part(0.0, 0, **{PROMPT: 0})]], None)
    assert (rates.rows["tries"][0], rates.rows["mean"][0]) == (2, np.float32(0.5))


def one_in_three(args, sample, sampling_params):
    """Returns three parts with reward 1 for a prompt's first response, and one with reward 0 for the second."""
    made = []
    for reward in (1.0, 1.0, 1.0) if sample.index % 2 == 0 else (0.0,):
        one = part(reward, sample.group_index, status=STATUS.TRUNCATED if reward else STATUS.COMPLETED)
        one.index, one.tokens, one.response = sample.index, [1, 2, 3], "ab"
        made.append(one)
    return made


@pytest.mark.parametrize("group_rm", [False, True])
def test_the_score_of_an_evaluation_counts_trajectories(tmp_path, group_rm):
    path = write_lines(tmp_path / "d.jsonl", [{"prompt": "q"}, {"prompt": "r"}])
    args = make_args(
        custom_generate_function_path="test_trajectories.one_in_three",
        eval_prompt_data=["d", path],
        n_samples_per_eval_prompt=2,
        log_passrate=True,
        group_rm=group_rm,
    )
    make_state(args)
    data = generate_rollout(args, 0, None, evaluation=True).data
    assert data["d"]["rewards"] == [1.0, 0.0, 1.0, 0.0] and data["d"]["truncated"] == [True, False] * 2
    assert len(data["d"]["samples"]) == 8
    found = eval_metrics(Config.from_args(args), data)
    assert found["eval/d"] == found["eval/d-truncated_ratio"] == found["eval/d/truncated_ratio"] == 0.5
    assert (found["eval/d-pass@1"], found["eval/d-pass@2"]) == (0.5, 1.0)
    assert not [name for name in found if "zero_std" in name]
