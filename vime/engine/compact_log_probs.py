"""Log-probs of sampled tokens as numbers alone, for requests that say so; every other request gets what vLLM gives.

vLLM's server spells each log-prob out: it decodes the token with those around it, keeps an object a position, and
writes four columns into the answer. All of that happens in the one process that speaks HTTP, and as the responses of a
rollout end together, the GPU waits for it (docs/design/decisions.md has the figures). We read ids and floats. So two
places of vLLM are wrapped in our servers' processes: where a request's log-probs are collected, and where a completion
is written.

Two more are wrapped for every request that wants the sampled tokens' log-probs alone. What a step made goes from vLLM's
engine process to the one that speaks HTTP as three arrays a request, and packing those takes many times as long as
packing all the rest. They travel as three arrays a step: `merge` before packing, `split` after.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

REQUEST = {"logprobs": 0, "vllm_xargs": {"vime_compact_log_probs": 1}}
"""What a /v1/completions body says: choices[0].logprobs then holds `token_logprobs`, and its other lists are empty."""
LOWEST = -9999.0
"""What vLLM writes for minus infinity, which JSON does not have."""


def install() -> None:
    """Wrap both places in this process. May run more than once."""
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.v1.engine.logprobs import LogprobsProcessor

    if not hasattr(LogprobsProcessor.from_new_request, "wraps"):
        collect = _collecting(LogprobsProcessor.from_new_request)
        LogprobsProcessor.from_new_request = staticmethod(collect)  # type: ignore[method-assign]
        write = _writing(OpenAIServingCompletion._create_completion_logprobs)
        OpenAIServingCompletion._create_completion_logprobs = write  # type: ignore[method-assign]
        _wrap_transport()


def _asks(sampling_params: Any) -> bool:
    (name,) = REQUEST["vllm_xargs"]
    return sampling_params.logprobs == REQUEST["logprobs"] and name in (sampling_params.extra_args or {})


def _collecting(vllms: Callable[..., Any]) -> Callable[..., Any]:
    def from_new_request(tokenizer: Any, request: Any) -> Any:
        if _asks(request.sampling_params):
            request.sampling_params.flat_logprobs = (
                True  # lists of numbers; HTTP has no other way to ask for them
            )
            return vllms(tokenizer=None, request=request)
        return vllms(tokenizer=tokenizer, request=request)

    from_new_request.wraps = vllms  # type: ignore[attr-defined]
    return from_new_request


def _writing(vllms: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.entrypoints.openai.completion.protocol import CompletionLogProbs
    from vllm.logprobs import FlatLogprobs

    def create_completion_logprobs(self: Any, *, top_logprobs: Any, **others: Any) -> Any:
        if isinstance(top_logprobs, FlatLogprobs):  # one entry a position: that of the sampled token
            return CompletionLogProbs(token_logprobs=[max(value, LOWEST) for value in top_logprobs.logprobs])
        return vllms(self, top_logprobs=top_logprobs, **others)

    return create_completion_logprobs


FIELDS = ("logprob_token_ids", "logprobs", "sampled_token_ranks", "cu_num_generated_tokens")
"""Of vLLM's LogprobsLists: three arrays of rows, and what is None for a single request."""
MERGED = -1
"""What the fourth field of merged ones begins with; the rows of each request follow."""


def merge(outputs: Any) -> bool:
    """Move the log-probs of all requests of an EngineCoreOutputs to the first one: arrays of all rows, and in the field
    that is None for a single request MERGED and the rows of each. Outputs with log-probs of other tokens too are left
    as they are. Returns whether it did."""
    from vllm.v1.outputs import LogprobsLists

    each = [output.new_logprobs for output in outputs.outputs]
    present = [lists for lists in each if lists is not None]
    if len(present) < 2 or any(lists.logprobs.shape[1] != 1 for lists in present):
        return False
    rows = [0 if lists is None else len(lists.logprobs) for lists in each]
    for output in outputs.outputs:
        output.new_logprobs = None
    arrays = list(zip(*present, strict=True))[:3]
    outputs.outputs[0].new_logprobs = LogprobsLists(*map(np.concatenate, arrays), [MERGED, *rows])
    return True


def split(outputs: Any) -> None:
    """Undo `merge`."""
    from vllm.v1.outputs import LogprobsLists

    merged = outputs.outputs[0].new_logprobs if outputs.outputs else None
    if merged is None or not merged.cu_num_generated_tokens or merged.cu_num_generated_tokens[0] != MERGED:
        return
    *arrays, (_, *rows) = merged
    end = 0
    for output, count in zip(outputs.outputs, rows, strict=True):
        begin, end = end, end + count
        output.new_logprobs = LogprobsLists(*(array[begin:end] for array in arrays), None) if count else None


def _wrap_transport() -> None:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    if LogprobsLists._fields != FIELDS:
        raise RuntimeError(
            f"log-probs must have the fields {', '.join(FIELDS)} in vLLM, got {', '.join(LogprobsLists._fields)}; "
            "this vLLM is newer than vime.engine.compact_log_probs"
        )
    encode, decode = MsgpackEncoder.encode_into, MsgpackDecoder.decode

    def encode_into(self: Any, obj: Any, buf: bytearray) -> Any:
        if not isinstance(obj, EngineCoreOutputs) or not merge(obj):
            return encode(self, obj, buf)
        # All in one frame, as small arrays are: older vLLMs wait for the last frame alone before they use `buf` again.
        inline, self.size_threshold = self.size_threshold, sys.maxsize
        try:
            return encode(self, obj, buf)
        finally:
            self.size_threshold = inline

    def decode_and_split(self: Any, bufs: Any) -> Any:
        found = decode(self, bufs)
        if isinstance(found, EngineCoreOutputs):
            split(found)
        return found

    MsgpackEncoder.encode_into = encode_into  # type: ignore[method-assign]
    MsgpackDecoder.decode = decode_and_split  # type: ignore[method-assign]
