"""Tests requests that get their log-probs as numbers only, and others that get vLLM's own. By HTTP:
e2e/test_engine.py."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.v1.engine.logprobs import LogprobsProcessor

from slime import bridges
from vime.vllm import patches


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    """Installs it as in a server's process, and undoes it after the test."""
    with bridges.applied(*patches.PATCHES["server"]):
        yield


@pytest.mark.parametrize("flat", [True, False])
def test_numbers_alone_have_no_tokenizer(flat: bool) -> None:
    params = SamplingParams(logprobs=0, flat_logprobs=flat)
    collected = LogprobsProcessor.from_new_request(
        tokenizer="the tokenizer", request=SimpleNamespace(sampling_params=params)
    )
    assert collected.tokenizer == (None if flat else "the tokenizer")
    assert isinstance(collected.logprobs, FlatLogprobs if flat else list)
