"""Tests samples of a batch that fill no optimizer step, from plug-ins and saved files; samples that the run keeps;
FLOPs of a batch; and samples that the border check rejects."""

from __future__ import annotations

import importlib
import itertools

import pytest
from rollout_double import EngineDouble, make_tokenizer

from slime.config.hook_calls import Hooks
from slime.config.schema import Config
from slime.data.train_data import convert_samples_to_train_data
from slime.plan.flops import ForwardFlops
from slime.records import once
from slime.rollout.manager import RolloutManager
from slime.rules.resolve import resolve
from slime.tracking.journal import read_events
from slime.tracking.samples import read_samples
from slime.types import Sample


@pytest.fixture
def build(checkpoint, tmp_path):
    """Builds managers of batches of 16 samples, or of the size that a test gives."""
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
                resolve(given | flags), EngineDouble(make_tokenizer()), 1, {}, pack=lambda data: data
            )
        )
        return made[-1]

    yield build_one
    for manager in made:
        manager.close()


def fifteen_samples(args, rollout_id, data_source, evaluation=False):
    """Returns groups of 5, 5, 3 and 2 samples."""
    made, groups = itertools.count(), []
    for number, size in enumerate((5, 5, 3, 2)):
        groups.append([Sample(index=next(made), group_index=number, prompt="q") for _ in range(size)])
        for sample in groups[-1]:
            sample.append_response_tokens(tokens=[98], log_probs=[-0.5], text="b")
            sample.tokens, sample.reward, sample.status = [97, 98], 1.0, Sample.Status.COMPLETED
    return groups


@pytest.mark.parametrize("source", ["plug-in", "saved", "subsampled"])
def test_samples_that_fill_no_step_are_counted(build, tmp_path, caplog, source):
    """The log and the journal report the samples that are left out."""
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


@pytest.mark.parametrize("audit", ["off", "audit"])
def test_flops_of_the_pass_for_old_log_probs(build, audit):
    """The first of three optimizer steps needs no such pass, unless the audit compares its samples."""
    function = "test_left_out.fifteen_samples"
    manager = build(rollout_function_path=function, global_batch_size=4, rlk_consistency=audit)
    batch = manager.generate(0)
    (data,) = batch.rank_data
    assert data["num_microbatches"] == [4, 4, 4]
    one = ForwardFlops(manager.hf_config)(2, 1)
    assert batch.forward_flops == pytest.approx(12 * one, rel=1e-12)
    assert batch.old_flops == pytest.approx((12 if audit == "audit" else 8) * one, rel=1e-12)


@pytest.mark.parametrize(
    ("keep", "kept"), [(16, range(15)), (9, [*range(5), *range(10, 13)]), (3, range(10, 13))]
)
def test_whole_groups_are_kept_and_the_trainer_gets_their_places(build, tmp_path, keep, kept):
    """The groups have 5, 5, 3 and 2 samples. Rewards of the third group differ."""
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


FAULTS = {
    "few log-probs": {"rollout_log_probs": [-0.5] * 5},
    "no log-probs": {"rollout_log_probs": None},
    "many log-probs": {"rollout_log_probs": [-0.5] * 16},
    "long mask": {"loss_mask": [1] * 16},
    "short mask": {"loss_mask": [1] * 14},
    "no tokens": {"tokens": [], "response_length": 0, "rollout_log_probs": None},
    "long response": {"response_length": 18},
}
FAULT = ""


def hooks():
    """Returns this module as the run imports it."""
    return importlib.import_module("test_left_out")


def faulty_samples(args, rollout_id, data_source, evaluation=False):
    """Returns 16 samples with 15 response tokens. Those of the first group have the fault."""
    groups = [[Sample(index=4 * g + i, group_index=g, prompt="q") for i in range(4)] for g in range(4)]
    for sample in (sample for group in groups for sample in group):
        sample.tokens = [97] * 16
        sample.response_length, sample.response = 15, "a" * 15
        sample.rollout_log_probs, sample.teacher_log_probs = [-0.5] * 15, [-0.5] * 15
        sample.reward, sample.status = float(sample.index % 2), Sample.Status.COMPLETED
        if not sample.group_index:
            vars(sample).update(FAULTS[FAULT])
    return groups


@pytest.mark.parametrize("distilled", [False, True])
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("few log-probs", "rollout_log_probs must have one entry per response token, got 5 for 15 tokens of"),
        (
            "no log-probs",
            "rollout_log_probs must have one entry per response token, got none for 15 tokens of",
        ),
        (
            "many log-probs",
            "rollout_log_probs must have one entry per response token, got 16 for 15 tokens of",
        ),
        ("long mask", "loss_mask must have one entry per response token, got 16 for 15 tokens of"),
        ("short mask", "loss_mask must have one entry per response token, got 14 for 15 tokens of"),
        (
            "no tokens",
            "got 0 with 0 tokens for sample 0 of group 0; a generate function must fill sample.tokens",
        ),
        ("long response", "got 18 with 16 tokens for sample 0 of group 0; a generate function must fill"),
    ],
)
def test_what_the_border_refuses_is_named_before_metrics_and_records(
    build, tmp_path, monkeypatch, fault, said, distilled
):
    """The error comes before the sample records and the teacher's metrics, whose `zip()` error would name no sample."""
    monkeypatch.setattr(hooks(), "FAULT", fault)
    flags = (
        {"use_opd": True, "opd_teacher_url": ["http://127.0.0.1:9"], "opd_type": "vllm"} if distilled else {}
    )
    manager = build(rollout_function_path="test_left_out.faulty_samples", **flags)
    with pytest.raises(ValueError) as error:
        manager.generate(0)
    assert said in str(error.value) and "sample 0 of group 0" in str(error.value)
    assert not (tmp_path / "run" / "samples").exists()


def test_no_log_probs_at_all_is_one_warning_and_no_tokens_none(build, monkeypatch, caplog):
    """A sample without tokens is an error, and this warning does not come first."""
    monkeypatch.setattr(hooks(), "FAULT", "no tokens")
    once.forget()
    manager = build(rollout_function_path="test_left_out.without_log_probs")
    with pytest.raises(ValueError, match="must fill sample.tokens"):
        manager.generate(0)
    assert "fills no rollout_log_probs" not in caplog.text
    monkeypatch.setattr(hooks(), "FAULT", "no log-probs")
    assert build(rollout_function_path="test_left_out.without_log_probs").generate(0).rank_data
    assert caplog.text.count("fills no rollout_log_probs") == 1


def without_log_probs(args, rollout_id, data_source, evaluation=False):
    groups = faulty_samples(args, rollout_id, data_source)
    for sample in (sample for group in groups for sample in group):
        sample.rollout_log_probs = None
    return groups


def test_samples_of_a_conversion_hook_are_kept_as_they_are(build, tmp_path, monkeypatch):
    """The hook may return samples that fit no other rule."""
    monkeypatch.setattr(hooks(), "FAULT", "few log-probs")
    manager = build(
        rollout_function_path="test_left_out.faulty_samples",
        custom_convert_samples_to_train_data_path="test_left_out.mends",
    )
    manager.generate(0)
    first, *_, last = read_samples(tmp_path / "run", 0)
    assert [token.engine for token in first.tokens] == [None] * 15
    assert [token.engine for token in last.tokens] == [-0.5] * 15


def mends(args, samples):
    copies = [Sample.from_dict(sample.to_dict() | {"rollout_log_probs": [-1.0] * 15}) for sample in samples]
    config = Config.from_args(args).with_values(custom_convert_samples_to_train_data_path=None)
    return convert_samples_to_train_data(config, Hooks(config), copies)
