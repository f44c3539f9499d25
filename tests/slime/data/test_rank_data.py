"""A rank's data have fixed columns after each stage, and return them with their types."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from trainer_cases import make_config, make_samples, rank_data

from slime.data.train_data import group_rewards
from slime.types import Sample


@pytest.fixture
def data(root):
    return rank_data(make_config(root, global_batch_size=4), make_samples())


def test_stages_and_what_they_fill(data):
    assert data.stage == "sent" and data.samples == 9
    assert {"tokens", "loss_masks", "rewards", "rollout_log_probs"} <= set(data.list_stage_columns("sent"))
    data.to_device(torch.device("cpu"), per_token=False)
    assert data.stage == "device" and data.list_stage_columns("device") == ["loss_denominators"]
    data.fill("ref_log_probs", {i: torch.zeros(n) for i, n in enumerate(data.response_lengths)})
    data.reach("scored", ["ref_log_probs"], "the loss")
    assert data.list_stage_columns("scored") == ["ref_log_probs"]
    with pytest.raises(
        ValueError, match="the loss must have the columns returns, got .*before the stage advantages"
    ):
        data.reach("advantages", ["returns", "tokens"], "the loss")


def test_schedule_and_denominators(data):
    data.to_device(torch.device("cpu"), per_token=False)
    steps = list(data.steps)
    assert [len(step) for step in steps] == data.step_sizes and list(chain(*steps)) == data.micro_batches
    for step, normaliser in zip(steps, data.normalisers, strict=True):
        assert normaliser == 4
        for i in chain(*step):
            wanted = max(data["rollout_mask_sums"][i], 1.0) * 4
            assert data["loss_denominators"][i].tolist() == [wanted] * data.response_lengths[i]
    data.to_device(torch.device("cpu"), per_token=True)  # it is trained again from the start
    assert data.stage == "device" and data.normalisers == data["global_token_counts"]


def test_a_column_has_one_value_per_response_token(data):
    with pytest.raises(AssertionError, match="values has one value per response token"):
        data.fill("values", {i: torch.zeros(1) for i in range(9)})


def test_rewards_of_a_group():
    """A sample's own reward comes first. Two samples of the same rollout count once, with their mean."""
    samples = [Sample(index=i, group_index=i // 3, rollout_id=7 if i in (4, 5) else None) for i in range(6)]
    first = [[1.0, 2.0, 3.0], [2.0, 1.0, 3.0], [3.0, 1.0, 2.0]]
    second = [[4.0, 5.5], [5.5, 4.0], [5.5, 4.0]]
    assert group_rewards(samples, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == first + second
