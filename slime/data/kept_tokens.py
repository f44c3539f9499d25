"""The ids that the engine's top-p, top-k or min-p sampling kept for each response token (--replay-kept-tokens).

A sample has them under slime's names, `rollout_top_p_token_ids` and `rollout_top_p_token_offsets`: response token j
kept ids[offsets[j] : offsets[j + 1]]. A token without ids, such as that of a tool, counts as not cut.
Shapes: R response tokens of a sample, K ids of the token that kept the most, P rows of a packed micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rl_kernel.kept import KeptTokens
from slime.data.token_slice import TokenSlice
from slime.protocols import GenerateResult
from slime.types import Sample, TrainData

COLUMN = "rollout_kept_tokens"
NONE = -1
"""Fills the rows."""


def append(sample: Sample, ids: list[int], counts: list[int]) -> None:
    """Record what sampling kept for the last tokens of the response: `counts[i]` of `ids` for each."""
    before = sample.response_length - len(counts)
    offsets = (sample.rollout_top_p_token_offsets or [0] * (before + 1))[: before + 1]
    for count in counts:
        offsets.append(offsets[-1] + count)
    sample.rollout_top_p_token_ids = [*(sample.rollout_top_p_token_ids or []), *ids]
    sample.rollout_top_p_token_offsets = offsets


def check_answer(sample: Sample, result: GenerateResult, *, cut: bool) -> None:
    """ValueError, with the sample's name, for an engine's answer without a set for each token. `cut`: top-k keeps so
    few ids that no set can be larger than was asked for, and an empty one is an error too."""
    counts = [] if result.kept is None else result.kept[1]
    empty = counts.count(0) if cut else 0
    if len(counts) == len(result.token_ids) and not empty:
        return
    got = f"{empty} empty sets" if empty else f"{len(counts)} sets"
    raise ValueError(
        f"the engine must give a kept set for each token with --replay-kept-tokens, got {got} for "
        f"{len(result.token_ids)} tokens of sample {sample.index} of group {sample.group_index}; its answers must have "
        "the log-probs that it samples from (--logprobs-mode processed_logprobs)"
    )


def of_sample(sample: Sample) -> np.ndarray:
    """int32 [R, K], `NONE` after the last id of a token. ValueError without a record."""
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
    """Metrics of samples with a record: the mean size of a token's set, and the share of tokens without one. Such a
    token counts as not cut. Empty without a record."""
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
    """The records of all samples with the K of the widest."""
    width = max(x.shape[1] for x in rows)
    return [np.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=NONE) for x in rows]


def packed(data: TrainData, samples: list[int], part: TokenSlice) -> Tensor:
    """This context-parallel rank's rows of the micro-batch of `samples`: int32 [P, K], each what the token after it
    kept."""
    records: list[Tensor] = [data[COLUMN][i] for i in samples]
    out = torch.full((part.rows, records[0].shape[1]), NONE, dtype=torch.int32)
    row = 0
    for run in part.runs:
        record = records[run.sequence]
        first = (
            part.lengths[run.sequence] - len(record) - 1
        )  # the place that predicts the first response token
        begin, end = max(run.start, first), min(run.stop, first + len(record))
        if begin < end:
            out[row + begin - run.start : row + end - run.start] = record[begin - first : end - first]
        row += run.stop - run.start
    return out


def of_rows(columns: Mapping[str, Tensor], rows: Tensor) -> KeptTokens | None:
    """The ids that sampling kept for the tokens that `rows` [r] of a micro-batch predict; None where it has none."""
    found = columns.get(COLUMN)
    if found is None:
        return None
    ids = found[rows]
    known = ids != NONE
    return KeptTokens(ids[known], torch.nn.functional.pad(known.sum(1).cumsum(0), (1, 0)))
