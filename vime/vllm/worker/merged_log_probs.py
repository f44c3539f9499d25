"""The log-probs of one engine step on their way from vLLM's engine process to the process that serves HTTP.

vLLM sends three arrays per request, and packing them takes most of the time. In our servers, three arrays per step are
sent: `merge` before packing, `split` after it (docs/design/decisions.md has the figures). The reader gets the same
values as without it, also for requests of other clients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, bytestr

FIELDS = ("logprob_token_ids", "logprobs", "sampled_token_ranks", "cu_num_generated_tokens")
"""Of vLLM's LogprobsLists: three arrays of rows, and what is None for a single request."""
MERGED = -1
"""What the fourth field of merged ones begins with; the rows of each request follow."""


def merge(outputs: EngineCoreOutputs) -> bool:
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
    ids, values, ranks = map(np.concatenate, list(zip(*present, strict=True))[:3])
    outputs.outputs[0].new_logprobs = LogprobsLists(ids, values, ranks, [MERGED, *rows])
    return True


def split(outputs: EngineCoreOutputs) -> None:
    """Undo `merge`."""
    from vllm.v1.outputs import LogprobsLists

    merged = outputs.outputs[0].new_logprobs if outputs.outputs else None
    if merged is None or not merged.cu_num_generated_tokens or merged.cu_num_generated_tokens[0] != MERGED:
        return
    ids, values, ranks, rows = *merged[:3], merged.cu_num_generated_tokens[1:]
    end = 0
    for output, count in zip(outputs.outputs, rows, strict=True):
        begin, end = end, end + count
        own = slice(begin, end)
        output.new_logprobs = LogprobsLists(ids[own], values[own], ranks[own], None) if count else None


def merging(encode: Callable[..., Sequence[bytestr]]) -> Callable[..., Sequence[bytestr]]:
    """vLLM's `MsgpackEncoder.encode_into`, which merges the log-probs of a step before it packs them. Raises
    RuntimeError if vLLM's record of log-probs has other fields than `FIELDS`."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import LogprobsLists

    if LogprobsLists._fields != FIELDS:
        raise RuntimeError(
            f"log-probs must have the fields {', '.join(FIELDS)} in vLLM, got {', '.join(LogprobsLists._fields)}; "
            "this vLLM is newer than vime.vllm.worker.merged_log_probs"
        )

    def encode_into(self: MsgpackEncoder, obj: object, buf: bytearray) -> Sequence[bytestr]:
        if not isinstance(obj, EngineCoreOutputs) or not merge(obj):
            return encode(self, obj, buf)
        # All in one frame, as small arrays are: older vLLMs wait for the last frame alone before they use `buf` again.
        inline, self.size_threshold = self.size_threshold, sys.maxsize
        try:
            return encode(self, obj, buf)
        finally:
            self.size_threshold = inline

    return encode_into


def splitting(decode: Callable[..., object]) -> Callable[..., object]:
    """vLLM's `MsgpackDecoder.decode`, which splits merged log-probs after it has unpacked them."""
    from vllm.v1.engine import EngineCoreOutputs

    def decode_and_split(self: MsgpackDecoder, bufs: bytestr | Sequence[bytestr]) -> object:
        found = decode(self, bufs)
        if isinstance(found, EngineCoreOutputs):
            split(found)
        return found

    return decode_and_split
