"""Tests the table of columns: a new record brings values from the engine's answer to the loss, and no other code
names it."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from rollout_double import EngineDouble, make_args, make_state, make_tokenizer
from test_packing import HF
from train_data_cases import border as make_data_border

from slime.config.schema import Config
from slime.data import columns
from slime.data.columns import COLUMNS, Column
from slime.data.packing import pack
from slime.data.token_slice import token_slice
from slime.data.train_data import make_rank_data
from slime.data.transport import pack_columns, unpack_columns
from slime.megatron_backend.step.audit import rebuild_samples
from slime.protocols import UNKNOWN_VERSION, VERSIONS, GenerateResult
from slime.rollout import facts
from slime.rollout.generate import generate
from slime.types import Sample

MARGIN = Column(
    "margin", "response", "sample", np.float32, optional=True, default=-1.0, carried="training", mean=True
)


@pytest.fixture
def margin(monkeypatch) -> None:
    """Adds a record to the table."""
    monkeypatch.setitem(COLUMNS, "margin", MARGIN)


class TellingDouble(EngineDouble):
    """An engine double that also returns a margin per sampled token, which rises by 0.5 from token to token."""

    async def generate(self, token_ids, sampling_params, **others) -> GenerateResult:
        result = await super().generate(token_ids, sampling_params, **others)
        return replace(result, columns={"margin": (np.arange(len(result.token_ids)) * 0.5,)})


def generated(index: int) -> Sample:
    """Returns a sample with two turns of an engine and a tool's two tokens between them."""
    args, tokenizer = make_args(), make_tokenizer()
    engine = TellingDouble(tokenizer)
    make_state(args, tokenizer).engine = engine
    engine.args = args
    sample = Sample(index=index, group_index=index // 2, prompt=f"len={index + 3}", reward=float(index))

    async def go() -> None:
        await generate(args, sample, {"temperature": 1.0, "max_new_tokens": 20})
        sample.append_response_tokens(tokens=[7, 8], trainable=False)
        await generate(args, sample, {"temperature": 1.0, "max_new_tokens": 20})

    asyncio.run(go())
    return sample


def expected(sample: Sample) -> list[float]:
    turn = (sample.response_length - 2) // 2
    margins = [0.5 * i for i in range(turn)]
    return [*margins, -1.0, -1.0, *margins]


@pytest.mark.parametrize("cp_size", [1, 2])
def test_a_field_of_the_engine_reaches_the_micro_batch(margin, cp_size):
    samples = [generated(i) for i in range(4)]
    assert all(s.columns["margin"].count(None) == 2 for s in samples)
    copies = [Sample.from_dict(pickle.loads(pickle.dumps(s.to_dict()))) for s in samples]
    config, hooks = make_data_border()
    for data in make_rank_data(config, hooks, copies, 2, HF):
        arrived = unpack_columns(pickle.loads(pickle.dumps(pack_columns(data))))
        assert [x.dtype for x in arrived["margin"]] == [torch.float32] * 2
        for place, again in rebuild_samples(arrived, 2):
            versions = [0.0 if value >= 0 else UNKNOWN_VERSION for value in expected(samples[place])]
            assert again.columns == {"margin": expected(samples[place]), VERSIONS: versions}
        names = columns.carried(arrived, config, training=True, policy=True)
        assert "margin" in names and "margin" in columns.reported(arrived, config, "response")
        assert columns.carried(arrived, config, training=False, policy=True) == []
        wanted = torch.tensor(
            [value for index in arrived["sample_indices"] for value in expected(samples[index])]
        )
        found = torch.full_like(wanted, torch.nan)
        for rank in range(cp_size):
            batch = pack(arrived, [0, 1], names, device="cpu", cp_rank=rank, cp_size=cp_size)
            assert torch.equal(batch.columns["margin"], wanted)
            mine = slice(None) if batch.mine is None else batch.mine
            assert torch.equal(batch.local(batch.columns["margin"]), wanted[mine])
            assert len(batch.local(batch.columns["margin"])) == len(batch.rows)
            found[mine] = batch.local(batch.columns["margin"])
        assert torch.equal(found, wanted)  # together the ranks have every response token once


def test_without_a_record_nothing_of_it_travels():
    (data,) = make_rank_data(*make_data_border(), [generated(i) for i in range(4)], 1, HF)
    assert "margin" not in data


def test_a_column_without_a_default_needs_a_value_for_every_token(monkeypatch):
    monkeypatch.setitem(COLUMNS, "margin", replace(MARGIN, default=None))
    said = "margin must have one value per response token, got 8 for 10 tokens of sample 1 of group 0; give"
    sample = Sample(index=1, group_index=0, tokens=[1], reward=0.0)
    sample.append_response_tokens(tokens=[2] * 8, log_probs=[-1.0] * 8, columns={"margin": [0.0] * 8})
    assert COLUMNS["margin"].read_samples([sample]) == [[0.0] * 8]
    with pytest.raises(ValueError, match="margin must be set on all samples or none, got 1 of 2"):
        COLUMNS["margin"].read_samples([sample, Sample(tokens=[1, 2], response_length=1)])
    sample.append_response_tokens(tokens=[3, 3], trainable=False)
    with pytest.raises(ValueError, match=said):
        COLUMNS["margin"].read_samples([sample])


def test_values_must_be_as_many_as_tokens():
    sample = Sample(tokens=[1])
    with pytest.raises(
        ValueError, match="margin must have one entry per generated token, got 1 for 2 tokens"
    ):
        sample.append_response_tokens(tokens=[2, 3], log_probs=[-1.0, -1.0], columns={"margin": [0.0]})
    assert sample.tokens == [1] and sample.columns == {}


def test_every_list_of_a_rank_is_in_the_table():
    """The table leaves out counts of optimizer steps and micro-batches, and the indices of the samples."""
    (data,) = make_rank_data(*make_data_border(), [generated(i) for i in range(4)], 1, HF)
    facts.attach([data], [], None)
    steps = {
        "partition",
        "micro_batch_indices",
        "num_microbatches",
        "global_batch_sizes",
        "global_token_counts",
    }
    assert set(data) - steps <= set(COLUMNS)
    for column in COLUMNS.values():
        assert (column.dtype is not None) == (column.kind in ("response", "sequence")), column.name
        assert (column.to_rows is not None) == (column.kind == "ragged"), column.name
        assert column.to_tensor is not None or column.kind != "ragged", column.name
        assert column.carried == "never" or column.kind in ("response", "ragged"), column.name


def test_flags_turn_columns_on():
    on, off = Config.from_flat({"use_rollout_routing_replay": True}), Config.from_flat({})
    data = {"rollout_routed_experts": [], "kl": [], "advantages": []}
    assert columns.carried(data, on, training=False, policy=True) == ["rollout_routed_experts"]
    assert columns.carried(data, on, training=True, policy=False) == ["advantages"]
    assert columns.carried(data, off, training=True, policy=True) == ["advantages"]
    assert columns.reported(data, off, "response") == ["advantages"]
    assert columns.reported(data, on.with_values(kl_coef=0.1), "response") == ["advantages", "kl"]


def test_places_of_a_ragged_column_follow_the_tokens_of_the_rank(monkeypatch):
    """The column is [L_i, 2] per sample. The record's own function slices it like the tokens."""

    def rows(data, samples, part):
        joined = torch.cat([data["spans"][i] for i in samples])
        out = torch.full((part.rows, 2), -1)
        out[: len(part.tokens)] = joined[part.tokens]
        return out

    record = Column("spans", "ragged", "hook", carried="policy", to_tensor=torch.tensor, to_rows=rows)
    monkeypatch.setitem(COLUMNS, "spans", record)
    data = {
        "tokens": [torch.arange(5), torch.arange(6)],
        "response_lengths": [2, 3],
        "spans": [torch.arange(10).view(5, 2), torch.arange(12).view(6, 2)],
    }
    names = columns.carried(data, Config.from_flat({}), training=False, policy=True)
    for rank in range(2):
        batch = pack(data, [0, 1], names, device="cpu", multiple=4, cp_rank=rank, cp_size=2)
        part = token_slice([5, 6], rank=rank, size=2, multiple=4)
        wanted = 2 * batch.tokens[: len(part.tokens)]
        assert torch.equal(batch.of_rows["spans"][: len(part.tokens), 0], wanted)
