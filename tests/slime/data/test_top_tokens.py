"""Tests the sampler's most likely ids, from an engine's answers over several turns to the micro-batches of a rank."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from rollout_double import EngineDouble, make_args, make_state, make_tokenizer
from test_columns import HF
from train_data_cases import border

from slime.data import columns, kept_tokens, top_tokens
from slime.data.packing import pack
from slime.data.train_data import make_rank_data
from slime.data.transport import pack_columns, unpack_columns
from slime.megatron_backend.step.audit import rebuild_samples
from slime.protocols import KEPT_TOKENS, TOP, GenerateResult
from slime.rollout.debug_data import load_debug_rollout_data, save_debug_rollout_data
from slime.rollout.generate import generate, generate_and_rm
from slime.types import Sample

K = 3


class TopDouble(EngineDouble):
    """An engine double that returns ids 10 j, 10 j + 1, ... for token j of an answer."""

    async def generate(self, token_ids, sampling_params, *, columns, **others):
        result = await super().generate(token_ids, sampling_params, **others)
        self.asked = count = columns.get(TOP, 0)
        if not count:
            return result
        ids = 10 * np.arange(len(result.token_ids))[:, None] + np.arange(count)
        return replace(result, columns={TOP: (ids.astype(np.int32), -0.5 - ids.astype(np.float32))})


def run(evaluation=False, **flags):
    args, tokenizer = make_args(**flags), make_tokenizer()
    engine = TopDouble(tokenizer)
    make_state(args, tokenizer).engine = engine
    engine.args = args
    sample = Sample(index=7, group_index=3, prompt="len=3", reward=1.0)

    async def go():
        params = {"temperature": 1.0, "max_new_tokens": 20}
        if evaluation:
            return await generate_and_rm(args, sample, params, evaluation=True)
        await generate(args, sample, params)
        sample.append_response_tokens(tokens=[7, 8], trainable=False)
        return await generate(args, sample, params)

    asyncio.run(go())
    return sample, engine


CENTRED = {"use_score_centering": True, "score_centering_top_k": K}


def test_tokens_of_a_tool_have_no_ids():
    sample, engine = run(**CENTRED)
    ids, log_probs = top_tokens.read_rollout_top(sample)
    first = engine.asked and (sample.response_length - 2) // 2
    assert ids.dtype == np.int32 and log_probs.dtype == np.float32
    assert ids.shape == log_probs.shape == (sample.response_length, K)
    assert ids[:2].tolist() == [[0, 1, 2], [10, 11, 12]] and log_probs[1].tolist() == [-10.5, -11.5, -12.5]
    assert (ids[first : first + 2] == top_tokens.NONE).all() and not log_probs[first : first + 2].any()
    assert ids[first + 2].tolist() == [0, 1, 2]
    sample.append_response_tokens(tokens=[9], trainable=False)
    assert top_tokens.read_rollout_top(sample)[0][-1].tolist() == [top_tokens.NONE] * K


def test_nothing_is_asked_for_without_the_flag_nor_in_an_evaluation():
    sample, engine = run()
    assert engine.asked == 0 and sample.rollout_topk_token_ids is None
    sample, engine = run(evaluation=True, **CENTRED)
    assert engine.asked == 0 and engine.args.use_score_centering


def test_a_trained_token_without_ids_is_an_error():
    sample, _ = run(**CENTRED)
    sample.append_response_tokens(tokens=[9], log_probs=[-1.0])
    message = f"rollout_topk must have ids for every trained token .* token {sample.response_length - 1} of sample 7"
    with pytest.raises(ValueError, match=message):
        top_tokens.read_rollout_top(sample)
    sample.remove_sample = True
    assert len(top_tokens.read_rollout_top(sample)[0]) == sample.response_length
    sample.rollout_topk_log_probs = sample.rollout_topk_log_probs[:, :1]
    with pytest.raises(
        ValueError, match=r"must be ids and log-probs \[\d+, K\], one row per response token, got"
    ):
        top_tokens.read_rollout_top(sample)
    with pytest.raises(
        ValueError, match="rollout_topk must be set with --use-score-centering, got none for samp"
    ):
        top_tokens.read_rollout_top(Sample(index=1, response_length=2))


def test_values_that_are_not_finite_or_rows_that_are_missing_are_errors():
    sample, _ = run(**CENTRED)
    sample.rollout_topk_log_probs[1, 1] = np.nan
    with pytest.raises(ValueError, match="rollout_topk must have finite log-probs, got others for sample 7"):
        top_tokens.read_rollout_top(sample)
    with pytest.raises(
        ValueError, match=r"as many rows of likeliest ids as tokens, got \[99, 2\] and \[99, 2\]"
    ):
        top_tokens.append(sample, (np.zeros((99, 2), np.int32), np.zeros((99, 2), np.float32)))


def test_a_sample_is_saved_with_its_arrays(tmp_path):
    sample, _ = run(**CENTRED)
    sample.teacher_top = top_tokens.read_rollout_top(sample)
    path = str(tmp_path / "{rollout_id}.pt")
    save_debug_rollout_data(path, 1, [[sample]])
    ((loaded,),) = load_debug_rollout_data(path, 1)
    through_json = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
    for again in (loaded, through_json):
        assert np.array_equal(again.rollout_topk_token_ids, sample.rollout_topk_token_ids)
        assert again.rollout_topk_log_probs.dtype == np.float32
        assert all(np.array_equal(a, b) for a, b in zip(again.teacher_top, sample.teacher_top, strict=True))


@pytest.mark.parametrize("cp_size", [1, 2])
def test_the_columns_reach_the_micro_batch(cp_size):
    samples = [replace(run(**CENTRED)[0], index=i, group_index=i // 2) for i in range(4)]
    wider = samples[1]
    wider.rollout_topk_token_ids, wider.rollout_topk_log_probs = (
        np.pad(x, ((0, 0), (0, 1)), constant_values=-1)
        for x in (wider.rollout_topk_token_ids, wider.rollout_topk_log_probs)
    )
    config, hooks = border(**CENTRED)
    for data in make_rank_data(config, hooks, samples, 2, HF):
        arrived = unpack_columns(pack_columns(data))
        names = columns.carried(arrived, config, training=True, policy=True)
        assert set(top_tokens.ROLLOUT) <= set(names)
        assert columns.carried(arrived, config, training=False, policy=True) == []
        wanted = torch.cat(arrived["rollout_top_ids"])
        assert wanted.dtype == torch.int32 and wanted.shape[1] == K + 1
        found = torch.full_like(wanted, -9)
        for rank in range(cp_size):
            batch = pack(arrived, [0, 1], names, device="cpu", cp_rank=rank, cp_size=cp_size)
            assert torch.equal(batch.columns["rollout_top_ids"], wanted)
            found[slice(None) if batch.mine is None else batch.mine] = batch.local(
                batch.columns["rollout_top_ids"]
            )
        assert torch.equal(found, wanted)
        for place, again in rebuild_samples(arrived, 2):
            mine, width = samples[place], samples[place].rollout_topk_token_ids.shape[1]
            ids = again.rollout_topk_token_ids[: len(mine.rollout_topk_token_ids), :width]
            assert np.array_equal(ids, mine.rollout_topk_token_ids)


def test_the_columns_stay_on_the_host():
    config, hooks = border(**CENTRED)
    samples = [replace(run(**CENTRED)[0], index=i, group_index=i // 2) for i in range(4)]
    (data,) = make_rank_data(config, hooks, samples, 1, HF)
    data.to_device(torch.device("meta"), per_token=False)
    assert data["rollout_log_probs"][0].is_meta
    assert {data[name][0].device.type for name in top_tokens.ROLLOUT} == {"cpu"}


def answer(kept):
    columns = {} if kept is None else {KEPT_TOKENS: tuple(map(np.int32, kept))}
    return GenerateResult([1, 2], [-1.0, -1.0], "", "stop", [0], columns=columns)


@pytest.mark.parametrize(
    ("kept", "cut", "got"),
    [
        (None, False, "0 sets"),
        (([5], [1]), False, "1 sets"),
    ],
)
def test_an_answer_without_kept_sets_is_refused_by_the_samples_name(kept, cut, got):
    message = f"kept set for each token .* got {got} for 2 tokens of sample 7 of group 3; its answers must"
    with pytest.raises(ValueError, match=message):
        kept_tokens.check_answer(Sample(index=7, group_index=3), answer(kept), 9, {"top_k": 2})


@pytest.mark.parametrize(
    ("counts", "uncut"), [([9] * 3, 3), ([0] * 3, 3), ([5] * 20 + [0, 9, 9], 3), ([5] + [0] * 999, 999)]
)
def test_log_probs_that_top_k_did_not_cut_are_refused(counts, uncut):
    result = answered(counts)
    with pytest.raises(
        ValueError, match=rf"got {uncut} sets that top-k did not cut for {len(counts)} tokens"
    ):
        kept_tokens.check_answer(Sample(index=7, group_index=3), result, 9, {"top_k": 8})
    kept_tokens.check_answer(Sample(), result, 9, {"top_p": 0.9})


@pytest.mark.parametrize("counts", [[0], [9], [10], [9, 0], [5] * 20 + [0, 9], [5] * 90 + [0] * 10])
def test_a_few_tokens_with_many_ties_are_no_error(counts):
    kept_tokens.check_answer(Sample(), answered(counts), 9, {"top_k": 8})


def answered(counts):
    columns = {KEPT_TOKENS: (np.zeros(sum(counts), np.int32), np.asarray(counts, np.int32))}
    tokens = [1] * len(counts)
    return GenerateResult(tokens, [-1.0] * len(tokens), "", "stop", [0], columns=columns)


def test_a_set_that_was_too_large_or_no_token_at_all_is_no_error():
    kept_tokens.check_answer(Sample(), answer(([5], [1, 0])), 9, {})
    kept_tokens.check_answer(Sample(), answer(([5, 6], [2, 0])), 9, {"top_k": 1})  # a tie, and a larger one
    kept_tokens.check_answer(Sample(), GenerateResult([], [], "", "abort", [0]), 8, {"top_k": 1})


def test_generate_names_the_sample_whose_sets_are_missing():
    with pytest.raises(
        ValueError, match="sample 7 of group 3: the engine must give a kept set for each token"
    ):
        run(replay_kept_tokens=8)
