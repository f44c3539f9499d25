"""Merges an engine step's log-probs for the transfer from vLLM's engine process to the process that serves HTTP.

vLLM sends three arrays per request, and packing them takes most of the time. In our servers, three arrays per step are
sent: `merge` runs before packing, and `split` after unpacking (docs/design/decisions.md has the figures). The reader
gets the same values as without merging, also for other clients' requests.
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
"""Fields of vLLM's LogprobsLists: three arrays of rows, and a field that is None for a single request."""
MERGED = -1
"""First entry of the fourth field of merged lists. The numbers of rows per request follow."""


def merge(outputs: EngineCoreOutputs) -> bool:
    """Moves all log-probs of an EngineCoreOutputs to its first request. Returns True if it moved them.

    The first request's arrays then hold every row. Its fourth field, which is None for a single request, holds MERGED
    and the numbers of rows per request. Outputs with log-probs of more tokens than the sampled ones do not change.
    """
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
    """Undoes `merge`."""
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
    """Wraps vLLM's `MsgpackEncoder.encode_into` so that it merges the log-probs of a step before it packs them.

    Raises RuntimeError if vLLM's record of log-probs has other fields than `FIELDS`.
    """
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
        # All arrays go into one frame, as small arrays do: older versions of vLLM wait only for the last frame before
        # they reuse `buf`.
        inline, self.size_threshold = self.size_threshold, sys.maxsize
        try:
            return encode(self, obj, buf)
        finally:
            self.size_threshold = inline

    return encode_into


def splitting(decode: Callable[..., object]) -> Callable[..., object]:
    """Wraps vLLM's `MsgpackDecoder.decode` so that it splits merged log-probs after it has unpacked them."""
    from vllm.v1.engine import EngineCoreOutputs

    def decode_and_split(self: MsgpackDecoder, bufs: bytestr | Sequence[bytestr]) -> object:
        found = decode(self, bufs)
        if isinstance(found, EngineCoreOutputs):
            split(found)
        return found

    return decode_and_split
