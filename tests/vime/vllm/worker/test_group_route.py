"""Tests the fields that a server reads from a request for a group of samples, and its answers. With an engine:
e2e/test_engine.py."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.metrics.stats import RequestStateStats

from slime.protocols import EXPERTS, KEPT_TOKENS, TOP, VERSIONS
from vime.vllm.client import parse_result
from vime.vllm.group_wire import ADAPTER_FIELD, COLUMNS_FIELD, SAMPLES, unpacked
from vime.vllm.versions import refusals
from vime.vllm.worker.adapter import ServedAdapters, adapter_number
from vime.vllm.worker.columns.token_versions import Span, attach
from vime.vllm.worker.group_route import LOWEST, GroupRequest, _make_answer, answer


def body(
    prompt: list[int], each: list[dict[str, Any]], shared: dict[str, Any] | None = None, **more: Any
) -> bytes:
    return json.dumps({"prompt": prompt, SAMPLES: {"shared": shared or {}, "each": each}, **more}).encode()


def test_each_sample_has_its_own_parameters_and_those_of_all() -> None:
    each = [{"seed": 3, "max_tokens": 4}, {"seed": 5, "max_tokens": 2}]
    # `echo` is one of the fields that the router adds.
    request = GroupRequest(body([1, 2], each, {"temperature": 0.5}, echo=False), 6, 50)
    found = [(p.seed, p.max_tokens, p.temperature, p.flat_logprobs) for p in request.samples]
    assert found == [(3, 4, 0.5, True), (5, 2, 0.5, True)]
    assert request.columns == {}
    asked = GroupRequest(body([1], each, {COLUMNS_FIELD: {EXPERTS: 0}}), 6, 50)
    assert asked.columns == {EXPERTS: 0} and asked.samples[0].routed_experts_prompt_start == 0
    for wrong, said in (
        ([], "must map names of columns to integers"),
        ({"margin": 1}, r"columns must be among .* got \['margin'\]"),
    ):
        with pytest.raises(ValueError, match=said):
            GroupRequest(body([1], each, {COLUMNS_FIELD: wrong}), 6, 50)


def test_a_response_is_cut_to_a_context_that_the_client_does_not_know() -> None:
    """The context is that of --max-model-len auto."""
    each = [{"max_tokens": 9, "min_tokens": 7}, {"max_tokens": 3}, {}]
    request = GroupRequest(body([1, 2], each), 6, 50, cuts=True)
    assert [(p.max_tokens, p.min_tokens) for p in request.samples] == [(4, 4), (3, 0), (4, 0)]
    with pytest.raises(ValueError, match="context of 6 tokens, got 6 and up to 1"):
        GroupRequest(body([1] * 6, [{"max_tokens": 1}]), 6, 50, cuts=True)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (body([], [{}]), ValueError, "must have a prompt and samples, got 0 tokens and 1 samples"),
        (body([1], []), ValueError, "must have a prompt and samples, got 1 tokens and 0 samples"),
        (body([1, 2], [{"max_tokens": 5}]), ValueError, "context of 6 tokens, got 2 and up to 5"),
        (body([1], [{"temperature": -1.0}]), refusals(), "temperature must be non-negative"),
        (body([1], [{"no_such": 1}]), TypeError, "no_such"),
        (b"{", msgspec.DecodeError, "truncated"),
        (json.dumps({"prompt": "text", SAMPLES: {}}).encode(), msgspec.DecodeError, "prompt"),
    ],
)
def test_anything_else_is_refused(given: bytes, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        GroupRequest(given, 6, 50)


def test_a_request_names_its_adapter() -> None:
    assert GroupRequest(body([1], [{}], {ADAPTER_FIELD: "maths"}), 60, 50).adapter == "maths"
    assert GroupRequest(body([1], [{}]), 60, 50).adapter == ""
    adapters = ServedAdapters()
    adapters.serve("code", SimpleNamespace(lora_requests={}))
    found = adapters.find("code")
    assert found is not None and found.lora_int_id == adapter_number("code") > 0
    assert adapters.find("") is None
    with pytest.raises(ValueError, match="an adapter that the engine has, got maths; it has code"):
        adapters.find("maths")


def test_no_more_ids_than_the_vocabulary_has_are_asked_for() -> None:
    wanted = [GroupRequest(body([1], [{}], {COLUMNS_FIELD: {KEPT_TOKENS: n}}), 100, 50) for n in (0, 8, 64)]
    assert [(r.columns[KEPT_TOKENS], r.samples[0].logprobs) for r in wanted] == [(0, 0), (8, 8), (50, 50)]


def test_what_sampling_kept_of_each_token() -> None:
    flat = FlatLogprobs()
    cut, half = float("-inf"), math.log(0.5)
    flat.append_fast([7, 7, 9, 4], [half, half, half, cut], iter([1, 1, 2, 3]), iter([None] * 4))
    flat.append_fast(
        [3, 8, 9], [-1.5, -1.0, -1.2], iter([4, 1, 2]), iter([None] * 3)
    )  # more ids have the remaining probability
    flat.append_fast([5, 5, 6], [0.0, 0.0, cut], iter([1, 1, 2]), iter([None] * 3))
    made = CompletionOutput(0, "text", [7, 3, 5], None, flat, finish_reason="length")
    attach(made, [Span(1, 0, 3)])
    given = RequestOutput("name", None, [1], None, [made], True)
    sent = _make_answer(given, 0, {KEPT_TOKENS: 3})
    assert np.frombuffer(sent.log_probs, np.float32).tolist() == pytest.approx([half, -1.5, 0.0])
    assert [array.tolist() for array in unpacked(sent.columns[KEPT_TOKENS])] == [[7, 9, 5], [2, 0, 1]]
    assert _make_answer(given, 0, {}).columns.keys() == {VERSIONS}


def test_the_likeliest_ids_of_each_token() -> None:
    flat = FlatLogprobs()
    flat.append_fast([7, 7, 9, 4], [-0.5, -0.5, -1.5, -2.0], iter([1, 1, 2, 3]), iter([None] * 4))
    flat.append_fast([3, 8, 9, 2], [-4.0, -1.0, -1.2, float("-inf")], iter([9, 1, 2, 3]), iter([None] * 4))
    made = CompletionOutput(0, "text", [7, 3], None, flat, finish_reason="length")
    attach(made, [Span(1, 0, 2)])
    sent = _make_answer(RequestOutput("name", None, [1], None, [made], True), 0, {TOP: 3})
    found = parse_result(sent, 1, {}).columns[TOP]
    assert found[0].tolist() == [[7, 9, 4], [8, 9, 2]]
    assert found[1].tolist() == pytest.approx(np.array([[-0.5, -1.5, -2.0], [-1.0, -1.2, LOWEST]]))
    wanted = [
        GroupRequest(body([1], [{}], {COLUMNS_FIELD: {KEPT_TOKENS: 4, TOP: n}}), 100, 50) for n in (0, 8, 64)
    ]
    assert [(r.columns[TOP], r.samples[0].logprobs) for r in wanted] == [(0, 4), (8, 8), (50, 50)]


def output(log_probs: list[float], times: RequestStateStats | None = None) -> RequestOutput:
    flat = FlatLogprobs()
    for place, value in enumerate(log_probs):
        flat.append_fast([place], [value], iter([1]), iter([None]))
    ids = list(range(len(log_probs)))
    rows = np.ones((len(ids) + 1, 2, 1), np.uint8)
    made = CompletionOutput(0, "text", ids, None, flat, routed_experts=rows, finish_reason="length")
    attach(made, [Span(4, 0, 1), Span(5, 1, len(ids))])
    return RequestOutput("name", None, [7, 8], None, [made], True, metrics=times, num_cached_tokens=1)


def test_log_probs_stay_as_they_are_but_for_minus_infinity() -> None:
    sent = _make_answer(output([-0.5, float("-inf"), float("nan")]), 3, {})
    assert np.frombuffer(sent.token_ids, np.int32).tolist() == [0, 1, 2]
    values = np.frombuffer(sent.log_probs, np.float32)
    assert values[:2].tolist() == [-0.5, LOWEST] and np.isnan(values[2])
    assert (sent.place, sent.prompt_tokens, sent.cached_tokens) == (3, 2, 1)
    assert sent.weight_versions == [4, 5]
    assert parse_result(_make_answer(output([-0.5, -1.0, -2.0]), 3, {}), 2, {}).token_columns == {
        "token_versions": [4, 5, 5]
    }


def test_experts_travel_only_where_they_were_asked_for() -> None:
    assert EXPERTS not in _make_answer(output([-0.5]), 0, {}).columns
    (rows,) = unpacked(_make_answer(output([-0.5]), 0, {EXPERTS: 0}).columns[EXPERTS])
    assert rows.shape == (2, 2, 1) and rows.dtype == np.uint8
    (rows,) = unpacked(_make_answer(output([-0.5]), 0, {EXPERTS: 1}).columns[EXPERTS])
    assert rows.shape == (1, 2, 1), "this answer of vLLM begins with the prompt"


def test_times_are_in_seconds_and_missing_where_vllm_has_none() -> None:
    times = RequestStateStats(queued_ts=10.0, scheduled_ts=10.25, first_token_ts=11.0, last_token_ts=13.0)
    sent = _make_answer(output([-0.5] * 5, times), 0, {})
    assert (sent.queue_s, sent.decode_tokens_per_s) == (0.25, 2.0)
    short = _make_answer(output([-0.5], times), 0, {})
    assert (short.queue_s, short.decode_tokens_per_s) == (0.25, None), "one token has no time between tokens"
    silent = _make_answer(output([-0.5]), 0, {})
    assert (silent.queue_s, silent.decode_tokens_per_s) == (None, None)


def test_a_fault_of_the_engine_breaks_the_answer() -> None:
    """The client gets no answer and retries. The test uses a double, because it cannot make a real engine fail in one
    request."""

    async def generate(*_: Any, **__: Any) -> AsyncIterator[Any]:
        raise RuntimeError("out of memory")
        yield

    async def run() -> None:
        engine = SimpleNamespace(
            generate=generate, model_config=SimpleNamespace(max_model_len=6, get_vocab_size=lambda: 50)
        )
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        with pytest.raises(RuntimeError, match="out of memory"):
            given = body([1], [{"max_tokens": 2}])
            await answer(engine, given, asyncio.Event().wait, send, lambda _: [0], ServedAdapters())
        assert sent == []
        other = body([1], [{"max_tokens": 2}], {ADAPTER_FIELD: "maths"})
        await answer(engine, other, asyncio.Event().wait, send, lambda _: [0], ServedAdapters())
        assert sent[0]["status"] == 400 and b"got maths; it has none" in sent[1]["body"]

    asyncio.run(run())
