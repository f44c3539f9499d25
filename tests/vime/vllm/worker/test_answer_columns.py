"""A column from the engine to the train data: one producer, one record in the table, and its reader."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from rollout_double import EngineDouble, make_args, make_state, make_tokenizer
from test_group_route import body, output

from slime.config import Config
from slime.data import columns
from slime.data.columns import COLUMNS, Column
from slime.rollout.generate import generate
from slime.types import Sample
from vime.vllm.client import parse_result
from vime.vllm.group_wire import COLUMNS_FIELD, Frames, frame
from vime.vllm.worker.columns.producers import PRODUCERS, Producer
from vime.vllm.worker.group_route import GroupRequest, _make_answer


def test_a_new_column_needs_a_producer_and_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file between the engine and the sample names the column."""
    record = Column("margin", "response", "sample", np.float32, optional=True, asked=True, carried="training")
    monkeypatch.setitem(COLUMNS, "margin", record)
    make = lambda output, argument: (np.arange(len(output.outputs[0].token_ids), dtype=np.float32),)  # noqa: E731
    monkeypatch.setitem(PRODUCERS, "margin", Producer(make))
    wanted = columns.wanted(Config.from_flat({}), lambda column: 0)
    assert wanted == {"margin": 1}
    request = GroupRequest(body([1], [{}], {COLUMNS_FIELD: wanted}), 100, 50)
    sent = frame(_make_answer(output([-0.5, -1.0]), 0, request.columns))
    (answer,) = Frames().feed(sent)
    result = parse_result(answer, 2, wanted)

    class Engine(EngineDouble):
        async def generate(self, token_ids: list[int], sampling_params: Any, **others: Any) -> Any:
            assert others["columns"] == wanted
            return replace(result, token_ids=[5, 6])

    args, tokenizer = make_args(), make_tokenizer()
    state = make_state(args, tokenizer)
    state.engine = Engine(tokenizer)
    sample = Sample(index=0, group_index=0, prompt="q", reward=1.0)
    asyncio.run(generate(args, sample, {"temperature": 1.0, "max_new_tokens": 4}))
    state.close()
    assert sample.columns["margin"] == [0.0, 1.0]
    assert record.read_samples([sample]) == [[0.0, 1.0]]


def test_a_frame_with_columns_is_small() -> None:
    """A token costs 8 bytes for its id and log-prob, and 4 for the version of its weights."""
    few, many = (
        len(msgspec.msgpack.encode(_make_answer(output([-0.5] * count), 0, {}))) for count in (100, 1100)
    )
    assert (many - few) / 1000 < 12.1
