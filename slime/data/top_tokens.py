"""The likeliest ids of another distribution for each response token, with their log-probs. The distribution is that of
the engine that sampled (--use-score-centering) or of a teacher (--opd-top-k).

Shapes: a sample has R response tokens, and a token has K ids, the likeliest id first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime.protocols import TOP, Arrays
from slime.protocols.engine_column import EngineColumn
from slime.types import Sample, TrainData

ROLLOUT = ("rollout_top_ids", "rollout_top_log_probs")
"""The sampler's columns, int32 and float32 [R, K]."""
TEACHER = ("teacher_top_ids", "teacher_top_log_probs")
"""The teacher's columns, int32 and float32 [R, K]."""
NONE = -1
"""Id of a token that the engine did not sample. The log-probs of such a token are 0."""

Top = tuple[np.ndarray, np.ndarray]
"""(ids [R, K] int32, log-probs [R, K] float32 in nats)."""


def append(sample: Sample, top: Arrays) -> None:
    """Appends the sampler's ids and log-probs for the last tokens of the response. Raises ValueError unless both have
    one row per token."""
    ids, log_probs = top
    first = sample.response_length - len(ids)
    if first < 0 or ids.shape != log_probs.shape:
        raise ValueError(
            f"the engine must give as many rows of likeliest ids as tokens, got {list(ids.shape)} and "
            f"{list(log_probs.shape)} for sample {sample.index} of group {sample.group_index}; check its version"
        )
    before = sample.rollout_topk_token_ids, sample.rollout_topk_log_probs
    known = _ids(before[0], first, ids.shape[1]), _log_probs(before[1], first, ids.shape[1])
    sample.rollout_topk_token_ids = np.concatenate([known[0], ids])
    sample.rollout_topk_log_probs = np.concatenate([known[1], log_probs])


ENGINE = EngineColumn(
    TOP,
    ("rollout_topk_token_ids", "rollout_topk_log_probs"),
    asked=lambda config: config.algorithm.centred_ids,
    append=append,
)


def read_rollout_top(sample: Sample) -> Top:
    """Returns the sampler's ids and log-probs. Raises ValueError, with the sample's name, for a trained token without
    ids."""
    flag = "--use-score-centering"
    return _checked(
        sample, sample.rollout_topk_token_ids, sample.rollout_topk_log_probs, "rollout_topk", flag
    )


def read_teacher_top(sample: Sample) -> Top | None:
    """Returns ids and log-probs of a served teacher, or None if the sample has no such ids. Raises ValueError as in
    `read_rollout_top`."""
    if sample.teacher_top is None:
        return None
    return _checked(sample, *sample.teacher_top, "teacher_top", "--opd-top-k")


def _checked(sample: Sample, ids: object, log_probs: object, name: str, flag: str) -> Top:
    who = f"sample {sample.index} of group {sample.group_index}"
    if ids is None or log_probs is None:
        raise ValueError(
            f"{name} must be set with {flag}, got none for {who}; generate functions must fill it"
        )
    found = np.asarray(ids, np.int32), np.asarray(log_probs, np.float32)
    if found[0].ndim != 2 or found[0].shape != found[1].shape or len(found[0]) > sample.response_length:
        raise ValueError(
            f"{name} must be ids and log-probs [{sample.response_length}, K], one row per response token, got "
            f"{list(found[0].shape)} and {list(found[1].shape)} for {who}; generate functions must fill both alike"
        )
    count, width = sample.response_length, found[0].shape[1]
    rows = _ids(found[0], count, width), _log_probs(found[1], count, width)
    known = (rows[0] != NONE).any(1)
    trained = np.asarray(sample.loss_mask or [1] * count, bool) & (not sample.remove_sample)
    if (trained & ~known).any():
        raise ValueError(
            f"{name} must have ids for every trained token with {flag}, got none for token "
            f"{int(np.nonzero(trained & ~known)[0][0])} of {who}; generate functions must fill it for what they append"
        )
    if not np.isfinite(rows[1]).all():
        raise ValueError(
            f"{name} must have finite log-probs, got others for {who}; check the engine's weights"
        )
    return rows


def _ids(values: np.ndarray | None, count: int, width: int) -> np.ndarray:
    """Returns the first `count` rows of `values`, with rows of `NONE` after the last row of `values`."""
    return _into(np.full((count, width), NONE, np.int32), values)


def _log_probs(values: np.ndarray | None, count: int, width: int) -> np.ndarray:
    """Returns the first `count` rows of `values`, with rows of 0 after the last row of `values`."""
    return _into(np.zeros((count, width), np.float32), values)


def _into(out: np.ndarray, values: np.ndarray | None) -> np.ndarray:
    known = out[:0] if values is None else np.asarray(values)[: len(out)]
    out[: len(known)] = known
    return out


def as_tensor(rows: object) -> Tensor:
    """Returns the tensor of a sample's rows, which may be the lists of a conversion hook."""
    return torch.from_numpy(np.asarray(rows))


def same_width(data: TrainData) -> None:
    """Pads the rows of a column to the largest K of its samples, in place."""
    for name, fill in zip((*ROLLOUT, *TEACHER), (NONE, 0.0) * 2, strict=True):
        if name in data:
            width = max(x.shape[1] for x in data[name])
            data[name] = [
                np.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=fill) for x in data[name]
            ]


def read_sample_fields(data: TrainData, i: int) -> dict[str, Any]:
    """Returns the fields of sample i that `read_rollout_top` and `read_teacher_top` read."""
    fields: dict[str, Any] = {}
    if ROLLOUT[0] in data:
        names = ("rollout_topk_token_ids", "rollout_topk_log_probs")
        fields |= {field: data[name][i].cpu().numpy() for field, name in zip(names, ROLLOUT, strict=True)}
    if TEACHER[0] in data:
        fields["teacher_top"] = tuple(data[name][i].cpu().numpy() for name in TEACHER)
    return fields
