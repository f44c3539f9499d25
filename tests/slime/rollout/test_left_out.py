"""Samples of a batch that fill no optimizer step, from plug-ins and saved files, and those that the run keeps."""

from __future__ import annotations

import itertools

import pytest
from rollout_double import EngineDouble, make_tokenizer

from slime.rollout.manager import RolloutManager
from slime.rules.resolve import resolve
from slime.tracking.journal import read_events
from slime.tracking.samples import read_samples
from slime.types import Sample


@pytest.fixture
def build(checkpoint, tmp_path):
    """Managers of batches of 16 samples, or of what the tests say."""
    made = []

    def build_one(**flags) -> RolloutManager:
        given = {
            "hf_checkpoint": str(checkpoint),
            "disable_rollout_global_dataset": True,
            "run_dir": str(tmp_path / "run"),
            "num_rollout": 3,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 4,
            "global_batch_size": 8,
            "rollout_max_response_len": 4,
            "rollout_num_gpus": 1,
            "micro_batch_size": 1,
            "device": "cpu",
            "rm_type": "math",
        }
        made.append(
            RolloutManager(
                resolve(given | flags), EngineDouble(make_tokenizer()), 1, {}, put=lambda data: data
            )
        )
        return made[-1]

    yield build_one
    for manager in made:
        manager.close()


def fifteen_samples(args, rollout_id, data_source, evaluation=False):
    """Groups of 5, 5, 3 and 2 samples."""
    made, groups = itertools.count(), []
    for number, size in enumerate((5, 5, 3, 2)):
        groups.append([Sample(index=next(made), group_index=number, prompt="q") for _ in range(size)])
        for sample in groups[-1]:
            sample.append_response_tokens(tokens=[98], log_probs=[-0.5], text="b")
            sample.tokens, sample.reward, sample.status = [97, 98], 1.0, Sample.Status.COMPLETED
    return groups


@pytest.mark.parametrize("source", ["plug-in", "saved", "subsampled"])
def test_samples_that_fill_no_step_are_counted(build, tmp_path, caplog, source):
    """They were dropped without a line."""
    template = str(tmp_path / "{rollout_id}.pt")
    manager = build(rollout_function_path="test_left_out.fifteen_samples", save_debug_rollout_data=template)
    left, groups = 7, [2, 3]
    if source != "plug-in":
        manager.generate(0)
        share = {"subsampled": 0.75, "saved": None}[source]
        manager = build(load_debug_rollout_data=template, load_debug_rollout_data_subsample=share)
        left, groups = (5, [2]) if source == "subsampled" else (left, groups)
    caplog.clear()
    batch = manager.generate(0)
    assert sum(len(data["tokens"]) for data in batch.rank_data) == 8
    assert batch.metrics["rollout/samples_left_out"] == left
    assert (
        f"rollout 0: {left} of {8 + left} samples fill no optimizer step of --global-batch-size 8"
        in caplog.text
    )
    *_, event = read_events(tmp_path / "run", ("left_out",))
    assert (event["rollout"], event["samples"], event["groups"]) == (0, left, groups)


@pytest.mark.parametrize(
    ("keep", "kept"), [(16, range(15)), (9, [*range(5), *range(10, 13)]), (3, range(10, 13))]
)
def test_whole_groups_are_kept_and_the_trainer_gets_their_places(build, tmp_path, keep, kept):
    """Groups of 5, 5, 3 and 2 samples. Rewards of the third differ."""
    manager = build(rollout_function_path="test_left_out.unequal_samples", save_samples=keep)
    (data,) = manager.generate(0).rank_data
    found = list(read_samples(tmp_path / "run", 0))
    assert [one.place for one in found] == list(kept)
    assert {(one.group, one.group_size) for one in found} <= {(0, 5), (1, 5), (2, 3), (3, 2)}
    assert data["kept"] == [place in kept for place in data["partition"]]


def unequal_samples(args, rollout_id, data_source, evaluation=False):
    groups = fifteen_samples(args, rollout_id, data_source)
    groups[2][1].reward = 0.0
    return groups
