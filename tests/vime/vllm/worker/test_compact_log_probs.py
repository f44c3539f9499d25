"""Which requests get their log-probs as numbers alone, and that others get vLLM's own. By HTTP: e2e/test_engine.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.v1.engine.logprobs import LogprobsProcessor

from vime.vllm.worker import compact_log_probs


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a server's process, and undone after the test."""
    monkeypatch.setattr(LogprobsProcessor, "from_new_request", LogprobsProcessor.from_new_request)
    compact_log_probs.install()


@pytest.mark.parametrize("flat", [True, False])
def test_numbers_alone_have_no_tokenizer(flat: bool) -> None:
    params = SamplingParams(logprobs=0, flat_logprobs=flat)
    collected = LogprobsProcessor.from_new_request(
        tokenizer="the tokenizer", request=SimpleNamespace(sampling_params=params)
    )
    assert collected.tokenizer == (None if flat else "the tokenizer")
    assert isinstance(collected.logprobs, FlatLogprobs if flat else list)


def test_twice_wraps_once() -> None:
    once = LogprobsProcessor.from_new_request
    compact_log_probs.install()
    assert LogprobsProcessor.from_new_request is once
