"""Tests expert ids from the engine's answers to a packed row: joined, checked against the model, cut, saved."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from allocations import peak_bytes
from rollout_double import EngineDouble, make_args, make_state, make_tokenizer
from train_data_cases import border

from slime.data.packing import pack
from slime.data.routed_experts import COLUMN, OPEN, as_tensor, check_column, packed
from slime.data.token_slice import token_slice
from slime.data.train_data import make_rank_data
from slime.megatron_backend.step.audit import rebuild_samples
from slime.protocols import EXPERTS
from slime.rollout.debug_data import load_debug_rollout_data, save_debug_rollout_data
from slime.rollout.generate import generate, generate_and_rm
from slime.types import Sample

HF = {
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "num_hidden_layers": 3,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "moe_intermediate_size": 8,
    "vocab_size": 9,
}


def rows_of(start: int, stop: int) -> np.ndarray:
    """Returns [stop - start, 3, 2], the experts for each token i with layer 0 dense; the values identify i."""
    i = np.arange(start, stop)
    rows = np.zeros((len(i), 3, 2), np.uint8)
    rows[:, 1] = np.stack([i % 8, (i + 1 + i // 8 % 6) % 8], 1)
    rows[:, 2] = np.stack([(i + 3) % 8, i % 8], 1)
    return rows


class RoutingDouble(EngineDouble):
    """An engine double that returns the rows of `rows_of`."""

    async def generate(self, token_ids, sampling_params, *, columns, **others):
        result = await super().generate(token_ids, sampling_params, **others)
        self.asked = start = columns.get(EXPERTS)
        if start is None:
            return result
        stop = len(token_ids) + len(result.token_ids) - 1
        return replace(result, columns={EXPERTS: (rows_of(start, stop),)})


def run(prompt: str, *, evaluation: bool = False, turns: int = 1, **flags):
    args = make_args(**flags)
    tokenizer = make_tokenizer()
    engine = RoutingDouble(tokenizer)
    make_state(args, tokenizer).engine = engine
    engine.args = args
    sample = Sample(index=0, prompt=prompt, reward=1.0)

    async def go():
        params = {"temperature": 1.0, "max_new_tokens": 20}
        for _ in range(turns):
            if evaluation:
                await generate_and_rm(args, sample, params, evaluation=True)
            else:
                await generate(args, sample, params)
        return sample

    return asyncio.run(go()), engine


def test_a_response_in_parts_has_the_rows_of_all_its_tokens_once():
    sample, engine = run("len=5", turns=2, use_rollout_routing_replay=True)
    assert engine.asked == len("len=5") + 6 - 1  # the last token of the first part was not an input yet
    assert len(sample.tokens) == 5 + 6 + 6
    np.testing.assert_array_equal(sample.rollout_routed_experts, rows_of(0, 16))
    sample.check(require_experts=True)


async def by_hand(args, sample, sampling_params):
    """A generate function as users write it, with no code for evaluations."""
    return await generate(args, sample, sampling_params)


@pytest.mark.parametrize("function", [None, f"{__name__}.by_hand"])
def test_nothing_is_asked_for_without_the_flag_nor_in_an_evaluation(function):
    flags = {"custom_generate_function_path": function}
    sample, engine = run("len=5", **flags)
    assert engine.asked is None and sample.rollout_routed_experts is None
    sample, engine = run("len=5", evaluation=True, use_rollout_routing_replay=True, **flags)
    assert engine.asked is None and sample.rollout_routed_experts is None
    assert engine.args.use_rollout_routing_replay  # the next rollout requests them again


def changed(place, value) -> np.ndarray:
    rows = rows_of(0, 4)
    rows[place] = value
    return rows


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (None, r"must be \[4, 3, 2\], .* got none for sample 70; generate functions must fill it"),
        (rows_of(0, 5), r"must be \[4, 3, 2\], .* got \[5, 3, 2\] for sample 70"),
        (rows_of(0, 4)[:, :2], r"got \[4, 2, 2\] for sample 70"),
        (changed((2, 1, 0), 8), "must be below 8, the experts, got 8 for sample 70"),
        (
            changed((2, 2), 0),
            r"different experts of a token, got \[\[0, 0\], \[2, 3\], \[0, 0\]\] by layer for token 2",
        ),
    ],
)
def test_rows_that_are_not_the_models_are_refused(rows, said):
    data = {"tokens": [[1] * 5], "sample_indices": [70], COLUMN: [rows]}
    with pytest.raises(ValueError, match=f"^{COLUMN} .*{said}"):
        check_column(data, HF)
    check_column({**data, COLUMN: [rows_of(0, 4)]}, HF)


def test_wide_ids_stay_what_they_are():
    wide = as_tensor(np.array([[[300, 511]]], np.uint16))
    assert wide.dtype == torch.int16 and wide.tolist() == [[[300, 511]]]


def make_samples() -> list[Sample]:
    return [
        Sample(
            index=i,
            group_index=i // 2,
            tokens=list(range(n)),
            response_length=2,
            rollout_log_probs=[-1.0, -1.0],
            reward=float(i),
            rollout_routed_experts=rows_of(10 * i, 10 * i + n - 1),
        )
        for i, n in enumerate((5, 7, 4, 9))
    ]


def test_each_rank_gets_the_rows_of_its_samples():
    given = border(use_rollout_routing_replay=True)
    for rank in make_rank_data(*given, make_samples(), 2, HF):
        for index, rows, tokens in zip(rank["sample_indices"], rank[COLUMN], rank["tokens"], strict=True):
            assert rows.tolist() == rows_of(10 * index, 10 * index + len(tokens) - 1).tolist()
    without = make_rank_data(*border(), make_samples(), 2, HF)
    assert all(COLUMN not in rank for rank in without)
    lacking = make_samples()
    lacking[2].rollout_routed_experts = None
    with pytest.raises(ValueError, match="one row per token but the last, got none for 4 tokens of sample 2"):
        make_rank_data(*given, lacking, 2, HF)


@pytest.mark.parametrize(("size", "multiple"), [(1, 1), (1, 8), (2, 4)])
def test_a_packed_row_has_them_beside_its_tokens(size, multiple):
    given = border(use_rollout_routing_replay=True)
    (data,) = make_rank_data(*given, make_samples(), 1, HF)
    lengths = [len(tokens) for tokens in data["tokens"]]
    for rank in range(size):
        batch = pack(
            data, [0, 1, 2, 3], [COLUMN], device="cpu", multiple=multiple, cp_rank=rank, cp_size=size
        )
        part = token_slice(lengths, rank=rank, size=size, multiple=multiple)
        wanted = torch.full((part.rows, 3, 2), OPEN, dtype=torch.int16)
        row = 0
        for span in part.runs:
            for place in range(span.start, span.stop):
                if place < lengths[span.sequence] - 1:
                    first = 10 * data["sample_indices"][span.sequence]
                    wanted[row] = torch.from_numpy(rows_of(first + place, first + place + 1)[0])
                row += 1
        assert torch.equal(batch.of_rows[COLUMN], wanted)
    assert pack(data, [0, 1], (), device="cpu").of_rows == {}


def test_packing_writes_each_row_once(tmp_path):
    """The host does it in every pass, so it makes no copy except the result."""
    data = {COLUMN: [as_tensor(np.resize(rows_of(0, 100), (n - 1, 3, 2))) for n in (500, 300)]}
    part = token_slice([500, 300], multiple=1)
    peak = peak_bytes(lambda: packed(data, [0, 1], part), tmp_path / "trace.json")
    assert 800 * 3 * 2 * 2 <= peak < 801 * 3 * 2 * 2


def test_saved_rollouts_keep_them(tmp_path):
    template = str(tmp_path / "{rollout_id}.pt")
    samples = make_samples()
    save_debug_rollout_data(template, 3, [samples[:2], samples[2:]])
    again = [s for group in load_debug_rollout_data(template, 3) for s in group]
    for sample, loaded in zip(samples, again, strict=True):
        assert loaded.rollout_routed_experts.dtype == np.uint8
        np.testing.assert_array_equal(loaded.rollout_routed_experts, sample.rollout_routed_experts)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_the_batch_of_a_stopped_run_has_them_again(dtype):
    """`vime audit` and --load-debug-rollout-data read the samples that --rlk-consistency strict saves."""
    given, samples = border(use_rollout_routing_replay=True), make_samples()
    for sample in samples:
        sample.rollout_routed_experts = sample.rollout_routed_experts.astype(dtype)
    for data in make_rank_data(*given, samples, 2, HF):
        for place, sample in rebuild_samples(data, 2):
            assert sample.rollout_routed_experts.dtype == dtype
            np.testing.assert_array_equal(
                sample.rollout_routed_experts, samples[place].rollout_routed_experts
            )
            sample.check(require_experts=True)
