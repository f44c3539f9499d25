"""This module counts the weight updates between the weights that wrote a token and the weights that train on it.

Weights of version v have trained on v rollouts. A token of version v is therefore `rollout_id - v` updates old in
rollout `rollout_id`. With --stale-samples mask, tokens that are too old are not trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from slime.config.sections.rollout import RolloutConfig
from slime.data.columns import token_versions
from slime.protocols import UNKNOWN_VERSION
from slime.rollout.generate import FINISHED
from slime.rollout.stream.groups import StreamGroup
from slime.types import Sample, SampleGroup

START = "start_rollout_id"
"""Key of a sample's metadata: the rollout that sampled its first token."""


def find_age_limit(flags: RolloutConfig) -> int:
    """Returns the largest age of a token in weight updates. With --partial-rollout, a group may end in a later
    rollout."""
    return max(flags.max_staleness, int(flags.partial_rollout))


def figures(cut: Sequence[StreamGroup], rollout_id: int, allowed: int, *, masks: bool) -> dict[str, float]:
    """Returns the age metrics of a batch. With `masks`, removes tokens older than `allowed` updates from training.

    mean and max are computed over the age of the oldest token in every sample. over_limit is the number of samples
    with a token older than `allowed`. token_mean is the mean age of trained tokens. token_over_limit_frac is the share
    of trained tokens older than `allowed`, and token_unknown_frac the share whose version is unknown. A token of
    unknown version counts as the oldest token in its sample.
    """
    oldest: list[int] = []
    of_trained, unknown = [np.zeros(0, np.int64)], 0
    for group in cut:
        for sample in group.group:
            known = [version for version in sample.weight_versions if isinstance(version, int)]
            oldest.append(max(0, rollout_id - min(known, default=group.version)))
            versions = np.asarray(token_versions(sample) or [UNKNOWN_VERSION] * sample.response_length, int)
            is_unknown = versions == UNKNOWN_VERSION
            ages = np.where(is_unknown, oldest[-1], np.maximum(rollout_id - versions, 0))
            trained = _trained(sample)
            of_trained.append(ages[trained])
            unknown += int(is_unknown[trained].sum())
            if masks and oldest[-1] > allowed and not sample.remove_sample:
                _train_on(sample, trained & (ages <= allowed))
    ages = np.concatenate(of_trained)
    count = max(len(ages), 1)
    return {
        "mean": sum(oldest) / len(oldest),
        "max": float(max(oldest)),
        "over_limit": float(sum(age > allowed for age in oldest)),
        "token_mean": float(ages.sum()) / count,
        "token_over_limit_frac": float((ages > allowed).sum()) / count,
        "token_unknown_frac": unknown / count,
    }


def mark_start(groups: Iterable[SampleGroup], rollout_id: int) -> None:
    """Records, for samples with tokens that return to the data source, the rollout that sampled the first token."""
    for group in groups:
        for sample in group:
            if sample.response_length:
                sample.metadata.setdefault(START, rollout_id)


def is_stale(group: SampleGroup, rollout_id: int, limit: int) -> bool:
    """Returns True if a complete group from the buffer is older than `limit` weight updates. A group with an unfinished
    sample is never stale, because it continues with the current weights. `figures` counts its old tokens."""
    started: list[int] = [s.metadata[START] for s in group if START in s.metadata]
    if not started or any(s.status not in FINISHED for s in group):
        return False
    return rollout_id - min(started) > max(limit, 1)


def _trained(sample: Sample) -> np.ndarray:
    """Returns which response tokens are trained on, bool [R]."""
    if sample.remove_sample:
        return np.zeros(sample.response_length, bool)
    return (
        np.ones(sample.response_length, bool)
        if sample.loss_mask is None
        else np.array(sample.loss_mask, bool)
    )


def _train_on(sample: Sample, tokens: np.ndarray) -> None:
    """Restricts training to the response tokens that are True in `tokens`, bool [R]."""
    sample.loss_mask = tokens.astype(int).tolist()
    sample.remove_sample |= not tokens.any()
