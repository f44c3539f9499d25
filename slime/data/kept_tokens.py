"""The ids that the engine's top-p, top-k or min-p sampling kept for each response token (--replay-kept-tokens).

A sample stores the ids under slime's names, `rollout_top_p_token_ids` and `rollout_top_p_token_offsets`: sampling kept
ids[offsets[j] : offsets[j + 1]] for response token j. A token without ids, such as a tool's token, counts as not cut.
Shapes: a sample has R response tokens, the largest set of a token has K ids, and a packed micro-batch has P rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rl_kernel.kept import KeptTokens
from slime.data.token_slice import TokenSlice
from slime.protocols import KEPT_TOKENS, Arrays, GenerateResult
from slime.protocols.engine_column import EngineColumn
from slime.types import Sample, SamplingParams, TrainData

COLUMN = "rollout_kept_tokens"
NONE = -1
"""Id that fills the rest of a row."""
MOST_UNCUT = 2
"""An answer may have this number of sets that are empty or uncut although top-k bounds them, or a tenth of its sets."""


def append(sample: Sample, kept: Arrays) -> None:
    """Appends the ids that sampling kept for the last tokens of the response: `kept` is (ids, number of ids per
    token)."""
    ids, counts = (array.tolist() for array in kept)
    before = sample.response_length - len(counts)
    offsets = (sample.rollout_top_p_token_offsets or [0] * (before + 1))[: before + 1]
    for count in counts:
        offsets.append(offsets[-1] + count)
    sample.rollout_top_p_token_ids = [*(sample.rollout_top_p_token_ids or []), *ids]
    sample.rollout_top_p_token_offsets = offsets


def check_answer(sample: Sample, result: GenerateResult, largest: int, params: SamplingParams) -> None:
    """Raises ValueError, with the sample's name, for an engine's answer without a set for each token, or with log-probs
    that top-k did not cut.

    The request asked for the `largest` likeliest ids, and top-k keeps fewer. A set that is empty or has `largest` ids
    has many ties, which is rare, or its log-probs are over the whole vocabulary. An answer may have a few such sets.
    """
    counts = result.columns[KEPT_TOKENS][1].tolist() if KEPT_TOKENS in result.columns else []
    uncut = sum(not 0 < count < largest for count in counts)
    if not 0 < params.get("top_k", -1) < largest or uncut <= max(MOST_UNCUT, len(counts) // 10):
        uncut = 0
    if len(counts) == len(result.token_ids) and not uncut:
        return
    got = f"{uncut} sets that top-k did not cut" if uncut else f"{len(counts)} sets"
    raise ValueError(
        f"the engine must give a kept set for each token with --replay-kept-tokens, got {got} for "
        f"{len(result.token_ids)} tokens of sample {sample.index} of group {sample.group_index}; its answers must have "
        "the log-probs that it samples from (--logprobs-mode processed_logprobs)"
    )


ENGINE = EngineColumn(
    KEPT_TOKENS,
    ("rollout_top_p_token_ids", "rollout_top_p_token_offsets"),
    asked=lambda config: config.off_policy.listed_ids,
    append=append,
    check=check_answer,
)


def read_sample(sample: Sample) -> np.ndarray:
    """Returns the kept ids as int32 [R, K], with `NONE` after the last id of a token. Raises ValueError for a sample
    without them."""
    ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    if ids is None or offsets is None or len(offsets) != sample.response_length + 1:
        got = "none" if offsets is None else len(offsets)
        raise ValueError(
            f"rollout_top_p_token_offsets must have {sample.response_length + 1} entries with --replay-kept-tokens, "
            f"got {got} for sample {sample.index} of group {sample.group_index}; generate functions must fill it"
        )
    counts = np.diff(np.asarray(offsets, np.int64))
    width = int(counts.max(initial=0))
    rows = np.full((len(counts), width), NONE, np.int32)
    rows[np.arange(width) < counts[:, None]] = ids
    return rows


def figures(samples: Sequence[Sample]) -> dict[str, float]:
    """Returns metrics of the samples with kept ids: the mean size of a token's set, and the share of tokens without a
    set. Such a token counts as not cut. The result is empty if no sample has kept ids."""
    counts = [np.diff(s.rollout_top_p_token_offsets) for s in samples if s.rollout_top_p_token_offsets]
    sizes = np.concatenate(counts) if counts else np.zeros(0)
    if not len(sizes):
        return {}
    found = {"top_p_not_kept_frac": float((sizes == 0).mean())}
    if sizes.any():
        found["top_p_kept_vocab_per_token"] = float(sizes[sizes > 0].mean())
    return found


def as_tensor(rows: np.ndarray) -> Tensor:
    return torch.from_numpy(rows)


def same_width(rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns every sample's rows, padded to the largest K."""
    width = max(x.shape[1] for x in rows)
    return [np.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=NONE) for x in rows]


def packed(data: TrainData, samples: list[int], part: TokenSlice) -> Tensor:
    """Returns this context-parallel rank's rows for the micro-batch of `samples`, int32 [P, K]. A row has the kept ids
    of the next token."""
    records: list[Tensor] = [data[COLUMN][i] for i in samples]
    out = torch.full((part.rows, records[0].shape[1]), NONE, dtype=torch.int32)
    row = 0
    for run in part.runs:
        record = records[run.sequence]
        first = part.lengths[run.sequence] - len(record) - 1  # index that predicts the first response token
        begin, end = max(run.start, first), min(run.stop, first + len(record))
        if begin < end:
            out[row + begin - run.start : row + end - run.start] = record[begin - first : end - first]
        row += run.stop - run.start
    return out


def select_rows(columns: Mapping[str, Tensor], rows: Tensor) -> KeptTokens | None:
    """Returns the ids that sampling kept for the tokens that `rows` [r] of a micro-batch predict. Returns None if the
    micro-batch has no kept ids."""
    found = columns.get(COLUMN)
    if found is None:
        return None
    ids = found[rows]
    known = ids != NONE
    return KeptTokens(ids[known], torch.nn.functional.pad(known.sum(1).cumsum(0), (1, 0)))
