"""Tests log-probs of a step, through vLLM's own packing. e2e/test_engine.py tests the values in engines' answers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import numpy as np
import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from slime import bridges
from vime.vllm import patches
from vime.vllm.worker import merged_log_probs


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    """Installs it as in a server's process, and undoes it after the test."""
    with bridges.applied(*patches.PATCHES["server"]):
        yield


def lists(log_probs: list[float], *, width: int = 1) -> LogprobsLists:
    """Returns the lists of a single request: a row per token, the sampled token first."""
    rows = np.array(log_probs, np.float32)[:, None].repeat(width, 1)
    return LogprobsLists(np.arange(rows.size).reshape(rows.shape), rows, np.arange(len(rows)) + 3, None)


def through_the_socket(each: list[LogprobsLists | None]) -> tuple[list[LogprobsLists | None], int]:
    """Returns a step's outputs as the HTTP process receives them, and the arrays that were packed for it."""
    outputs = EngineCoreOutputs(
        outputs=[
            EngineCoreOutput(request_id=str(i), new_token_ids=[i], new_logprobs=found)
            for i, found in enumerate(each)
        ]
    )
    encoder = MsgpackEncoder()
    usual = encoder.size_threshold
    packed = encoder.encode_into(outputs, bytearray())
    assert encoder.size_threshold == usual
    assert len(packed) == 1, "one frame: the buffer must not be used again before it has been sent"
    arrays = 3 * sum(output.new_logprobs is not None for output in outputs.outputs)
    found = MsgpackDecoder(EngineCoreOutputs).decode(packed).outputs
    assert [output.request_id for output in found] == [str(i) for i in range(len(each))]
    return [output.new_logprobs for output in found], arrays


def same(got: LogprobsLists | None, sent: LogprobsLists | None) -> bool:
    if got is None or sent is None:
        return got is sent
    equal = (np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(got[:3], sent[:3], strict=True))
    return all(equal) and got.cu_num_generated_tokens is None


@pytest.mark.parametrize(
    "each, arrays",
    [
        ([lists([-0.5]), lists([-0.25, -1.0]), lists([float("-inf")])], 3),
        ([None, lists([-0.5]), None, lists([-2.0])], 3),  # the first request asks for no log-probs
        ([lists([-0.5]), lists([-0.25], width=3)], 6),  # another token's log-probs too, in vLLM's own way
        ([lists([-0.5]), None], 3),
        ([lists([-0.5 * i]) for i in range(1, 300)], 3),  # vLLM would send these arrays as separate frames
        ([None, None], 0),
        ([], 0),
    ],
)
def test_log_probs_of_a_step_travel_together(each, arrays):
    got, packed = through_the_socket(each)
    assert packed == arrays
    assert all(map(same, got, each))


def test_vllm_packs_its_outputs_where_they_are_merged():
    sends = inspect.getsource(EngineCoreProc.process_output_sockets)
    assert "encoder.encode_into(outputs" in sends


def test_a_vllm_with_other_fields_is_refused(monkeypatch):
    monkeypatch.setattr(LogprobsLists, "_fields", (*LogprobsLists._fields, "more"))
    with pytest.raises(RuntimeError, match="must have the fields .* got .* more"):
        merged_log_probs.merging(MsgpackEncoder.encode_into)
