"""Makes the columns of an engine's answers. A new column needs one entry in `PRODUCERS` (and one in
slime.data.columns, which asks for it and stores it)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from slime.protocols import EXPERTS, KEPT_TOKENS, TOP, VERSIONS, Arrays
from vime.vllm.worker.columns.token_versions import version_spans

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import RequestOutput

LOWEST = -9999.0
"""Log-prob that replaces minus infinity, as in vLLM's own answers."""
MISSING = 1e-3
"""Largest missing probability of a complete set of kept ids. A set that misses more is not the whole cut
distribution."""


@dataclass(frozen=True)
class Producer:
    """Makes one engine column."""

    make: Callable[[RequestOutput, int], Arrays | None]
    """`make(output, argument)` returns the column's arrays, or None if vLLM's output lacks the values for them."""
    likeliest: bool = False
    """The argument is a number of likeliest ids that vLLM must return with each token."""
    prepare: Callable[[SamplingParams, int], None] = lambda params, argument: None
    """Changes vLLM's sampling parameters of a request for the column."""


def kept_ids(output: RequestOutput, argument: int) -> Arrays | None:
    """Returns (ids, number of ids per token), int32: the likeliest ids that are not cut off, if together they have all
    of the probability. vLLM lists the likeliest ids after the sampled one."""
    flat = _flat(output)
    if flat is None:
        return None
    ids: list[int] = []
    counts: list[int] = []
    for first, end in zip(flat.start_indices, flat.end_indices, strict=True):
        found = {
            token: value
            for token, value in zip(flat.token_ids[first:end], flat.logprobs[first:end], strict=True)
            if value > LOWEST
        }
        whole = sum(map(math.exp, found.values())) > 1 - MISSING
        ids += found if whole else ()
        counts.append(len(found) if whole else 0)
    return np.asarray(ids, np.int32), np.asarray(counts, np.int32)


def top_ids(output: RequestOutput, argument: int) -> Arrays | None:
    """Returns (ids int32, log-probs float32), [tokens, argument] each: the likeliest ids of each token, which vLLM
    lists after the sampled one."""
    flat = _flat(output)
    if flat is None:
        return None
    rows = np.asarray(flat.start_indices, int)[:, None] + np.arange(1, argument + 1)
    log_probs = np.asarray(flat.logprobs, np.float32)[rows]
    return np.asarray(flat.token_ids, np.int32)[rows], np.maximum(log_probs, np.float32(LOWEST))


def experts(output: RequestOutput, argument: int) -> Arrays | None:
    """Returns the experts of the tokens from `argument` on, prompt included, without the last token."""
    rows = output.outputs[0].routed_experts
    if rows is None:
        return None
    tokens = len(output.prompt_token_ids or ()) + len(output.outputs[0].token_ids)
    whole = len(rows) == tokens - 1  # this version of vLLM ignores the first token
    return (np.ascontiguousarray(rows[argument:] if whole else rows),)


def _begin_experts(params: SamplingParams, argument: int) -> None:
    # older versions have no such argument of `SamplingParams.from_optional`
    params.routed_experts_prompt_start = argument


def versions(output: RequestOutput, argument: int) -> Arrays:
    """Returns the version of the weights that sampled each token, int32."""
    spans = version_spans(output.outputs[0])
    lengths = [span.end - span.start for span in spans]
    return (np.repeat(np.asarray([span.version for span in spans], np.int32), lengths),)


def _flat(output: RequestOutput) -> FlatLogprobs | None:
    return cast("FlatLogprobs | None", output.outputs[0].logprobs)


PRODUCERS: dict[str, Producer] = {
    KEPT_TOKENS: Producer(kept_ids, likeliest=True),
    TOP: Producer(top_ids, likeliest=True),
    EXPERTS: Producer(experts, prepare=_begin_experts),
    VERSIONS: Producer(versions),
}
