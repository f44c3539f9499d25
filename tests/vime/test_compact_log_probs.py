"""Which requests get their log-probs as numbers alone, and that others get vLLM's own. By HTTP: e2e/test_engine.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.logprobs import FlatLogprobs
from vllm.v1.engine.logprobs import LogprobsProcessor

from vime.engine import compact_log_probs
from vime.engine.compact_log_probs import REQUEST

OTHERS = [
    {"logprobs": 0},
    {"logprobs": 0, "vllm_xargs": {"other": 1}},
    {"logprobs": 0, "return_tokens_as_token_ids": True},
    {**REQUEST, "logprobs": 2},
]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a server's process, and undone after the test."""
    for owner, name in (
        (LogprobsProcessor, "from_new_request"),
        (OpenAIServingCompletion, "_create_completion_logprobs"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    compact_log_probs.install()


def collect(body: dict[str, Any]) -> LogprobsProcessor:
    request = CompletionRequest(model="policy", prompt=[1], max_tokens=2, **body)
    return LogprobsProcessor.from_new_request(
        tokenizer="the tokenizer", request=SimpleNamespace(sampling_params=request.to_sampling_params(2, {}))
    )


def write(log_probs: Any, top: int) -> Any:
    server = SimpleNamespace(
        return_tokens_as_token_ids=True, _get_decoded_token=OpenAIServingCompletion._get_decoded_token
    )
    return OpenAIServingCompletion._create_completion_logprobs(
        server, token_ids=[7, 9], top_logprobs=log_probs, num_output_top_logprobs=top, tokenizer=None
    )


def test_numbers_alone_are_collected_and_written():
    collected = collect(REQUEST)
    assert collected.tokenizer is None and isinstance(collected.logprobs, FlatLogprobs)
    collected.logprobs.append_fast([7], [-0.5], iter([3]), iter([None]))
    collected.logprobs.append_fast([9], [float("-inf")], iter([5]), iter([None]))
    collected.logprobs.append_fast([9], [float("nan")], iter([5]), iter([None]))  # which JSON does not have
    written = write(collected.logprobs, 0)
    assert written.token_logprobs == [-0.5, compact_log_probs.LOWEST, compact_log_probs.NOT_A_NUMBER]
    assert (written.tokens, written.top_logprobs, written.text_offset) == ([], [], [])


@pytest.mark.parametrize("body", OTHERS)
def test_other_requests_get_what_vllm_gives(body):
    collected = collect(body)
    assert collected.tokenizer == "the tokenizer" and collected.logprobs == []


def test_what_was_collected_by_word_is_written_by_word():
    from vllm.logprobs import Logprob

    entries = [{7: Logprob(-0.5, 1, "a")}, {9: Logprob(-0.25, 1, "b")}]
    written = write(entries, 0)
    assert written.tokens == ["token_id:7", "token_id:9"] and written.token_logprobs == [-0.5, -0.25]
    assert [list(entry.values()) for entry in written.top_logprobs] == [[-0.5], [-0.25]]


def test_twice_wraps_once():
    once = LogprobsProcessor.from_new_request
    compact_log_probs.install()
    assert LogprobsProcessor.from_new_request is once
