"""Tests the facts that a rollout records for a comparison, their transport, and the manager's errors for a bad
rollout."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch
from rollout_double import EngineDouble, make_args, make_state, make_tokenizer, write_lines

from slime.data.tokenizer import tokenizer_fingerprint
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.debug_data import load_with_facts
from slime.rollout.facts import COLUMN, first_difference, mask_checksum, sample_facts, token_checksum
from slime.rollout.generate import generate
from slime.rollout.manager import RolloutManager
from slime.rules.resolve import resolve
from slime.types import Sample

RUN = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "sampling": {}, "dtype": "float32", "tokenizer": "ab"}


@pytest.fixture
def build(checkpoint, tmp_path):
    made = []

    def build_one(mode: str = "audit", *, dp_size: int = 1, **flags) -> RolloutManager:
        rows = [{"input": f"{c} len={i + 1} :"} for i, c in enumerate("abcd")]
        given = {
            "hf_checkpoint": str(checkpoint),
            "run_dir": str(tmp_path / "run {x}"),
            "prompt_data": write_lines(tmp_path / "prompts.jsonl", rows),
            "num_rollout": 3,
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
            "rollout_max_response_len": 4,
            "rollout_num_gpus": 1,
            "micro_batch_size": 1,
            "device": "cpu",
            "custom_rm_path": "test_facts.parity_reward",
            "rlk_consistency": mode,
        }
        facts = {"rollout_engine_dtype": "bfloat16"}
        engine = EngineDouble(make_tokenizer())
        made.append(RolloutManager(resolve(given | flags), engine, dp_size, facts, pack=lambda data: data))
        return made[-1]

    yield build_one
    for manager in made:
        manager.close()


async def parity_reward(args, sample):
    return float(sample.index % 2)


async def cooler(args, sample, sampling_params):
    return await generate(args, sample, {**sampling_params, "temperature": 0.5, "min_p": 0.1})


def test_the_record_of_each_sample_reaches_its_rank(build, checkpoint):
    batch = build(dp_size=2, rollout_temperature=0.8).generate(0)
    for data in batch.rank_data:
        for i, record in enumerate(data[COLUMN]):
            assert record == {
                "temperature": 0.8,
                "top_p": 1.0,
                "top_k": -1,
                "sampling": {},
                "dtype": "bfloat16",
                "tokenizer": tokenizer_fingerprint(str(checkpoint)),
                "group_index": data["sample_indices"][i] // 2,
                "weight_version": [0],
                "token_ids": token_checksum(data["tokens"][i]),
                "mask": mask_checksum(data["loss_masks"][i]),
            }


def test_nothing_is_recorded_for_ranks_when_the_audit_is_off(build):
    assert COLUMN not in build("off").generate(0).rank_data[0]


def test_a_generate_function_that_samples_otherwise_is_noticed(build):
    batch = build(custom_generate_function_path="test_facts.cooler").generate(0)
    record = batch.rank_data[0][COLUMN][0]
    assert (record["temperature"], record["sampling"]) == (0.5, {"min_p": 0.1})
    plain = build().generate(0).rank_data[0]
    assert plain["metadata"][0] == {}, "the usual request leaves no note"


def test_parameters_that_are_left_out_are_those_of_the_engine():
    """A request without a temperature is answered at 1, whatever the run's flag is."""
    args = make_args(rollout_temperature=0.5)
    make_state(args)
    sample = Sample(prompt="q: len=2 :", index=1)
    asyncio.run(generate(args, sample, {"max_new_tokens": 4}))
    assert sample.metadata["sampling"]["temperature"] == 1.0


def test_replayed_samples_carry_the_facts_of_their_file(build, tmp_path):
    template = str(tmp_path / "saved" / "{rollout_id}.pt")
    batch = build("off", save_debug_rollout_data=template, rollout_temperature=0.8).generate(0)
    replay = build(load_debug_rollout_data=template)  # its own flags have temperature 1
    again = replay.generate(0).rank_data[0]
    assert [record["temperature"] for record in again[COLUMN]] == [0.8] * 4
    assert [record["token_ids"] for record in again[COLUMN]] == [
        token_checksum(tokens) for tokens in batch.rank_data[0]["tokens"]
    ]
    record = torch.load(tmp_path / "saved" / "0.pt", weights_only=True)
    del record["facts"]  # a file of another program
    torch.save(record, tmp_path / "saved" / "0.pt")
    assert build(load_debug_rollout_data=template).generate(0).rank_data[0][COLUMN] == [None] * 4


def nan_rollout(args, rollout_id, data_source, evaluation=False):
    groups = data_source.get_samples(2)
    for sample in (sample for group in groups for sample in group):
        sample.tokens, sample.response_length, sample.reward = [5, 6, 7, 8], 3, float(sample.index % 2)
        sample.rollout_log_probs = [-1.0, math.nan if sample.index == 2 else -2.0, -0.5]
    return RolloutFnTrainOutput(groups)


def no_log_probs(args, rollout_id, data_source, evaluation=False):
    output = nan_rollout(args, rollout_id, data_source)
    for sample in (sample for group in output.samples for sample in group):
        sample.rollout_log_probs = None
    return output


BAD = {
    "nan_rollout": "rollout_log_probs must be finite, got nan at position 1 of sample 2 of group 1; the batch is",
    "no_log_probs": "rollout_log_probs must have one entry per response token, got none for 3 tokens of sample 0",
}


@pytest.mark.parametrize("name", BAD)
def test_a_rollout_that_cannot_be_audited_is_saved_first(build, tmp_path, name):
    with pytest.raises(ValueError, match=BAD[name]) as error:
        build(rollout_function_path=f"test_facts.{name}").generate(1)
    path = tmp_path / "run {x}" / "audit" / "1.pt"
    assert f"--load-debug-rollout-data {path}" in str(error.value)
    groups, facts = load_with_facts(str(path).replace("{x}", "{{x}}"), 1)
    assert [[s.index for s in group] for group in groups] == [[0, 1], [2, 3]]
    assert facts["temperature"] == 1.0


def test_a_bad_rollout_is_not_saved_when_the_audit_is_off(build, tmp_path):
    with pytest.raises(ValueError, match=r"position 1 of sample 2 of group 1$"):
        build("off", rollout_function_path="test_facts.nan_rollout").generate(1)
    assert not (tmp_path / "run {x}" / "audit").exists()


def test_siblings_of_one_index_are_told_apart_by_their_tokens(build):
    manager = build()
    samples = [
        Sample(index=0, group_index=0, tokens=[1, 2, n], response_length=2, weight_versions=[n], reward=1.0)
        for n in (3, 4)
    ]
    for sample in samples:
        sample.rollout_log_probs = [-1.0, -1.0]
    manager.args.global_batch_size = 2
    (data,) = manager._rank_data(0, [samples], RUN)[0][1]
    versions = {
        tokens.tolist()[-1]: record["weight_version"]
        for tokens, record in zip(data["tokens"], data[COLUMN], strict=True)
    }
    assert versions == {3: [3], 4: [4]}


def test_the_first_difference_is_reported():
    sample = Sample(tokens=[1, 2, 3], response_length=2, weight_versions=[5])
    rollout = sample_facts(sample, RUN)
    trainer = {**RUN, "weight_version": [5], "token_ids": rollout["token_ids"], "mask": rollout["mask"]}
    assert first_difference(rollout, trainer) is None
    assert first_difference(None, trainer) == "unrecorded"
    assert first_difference(rollout, {**trainer, "top_p": 0.9, "weight_version": [6]}) == "weight_version"
    assert first_difference({**rollout, "top_p": 0.9, "dtype": "bfloat16"}, trainer) == "top_p"
    assert first_difference({**rollout, "sampling": {"min_p": 0.1}}, trainer) == "sampling"


def test_checksums_of_lists_and_tensors_agree():
    assert token_checksum([1, 2, 3]) == token_checksum(torch.tensor([1, 2, 3])) != token_checksum([1, 3, 2])
    assert (
        mask_checksum([1, 0]) == mask_checksum(torch.tensor([1, 0], dtype=torch.int32)) != mask_checksum([1])
    )


def test_the_fingerprint_is_of_the_vocabulary_alone(tmp_path):
    assert tokenizer_fingerprint(str(tmp_path)) is None
    make_tokenizer().save_pretrained(tmp_path)
    before = tokenizer_fingerprint(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert tokenizer_fingerprint(str(tmp_path)) == before
    (tmp_path / "tokenizer.json").write_text((tmp_path / "tokenizer.json").read_text().replace('"a"', '"ä"'))
    assert tokenizer_fingerprint(str(tmp_path)) not in (None, before)
