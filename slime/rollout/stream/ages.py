"""How many weight updates the tokens of a batch are behind the weights that train on them (--stale-samples).

Weights of version v have trained on v rollouts, so that a token of version v is `rollout_id - v` updates behind in
rollout `rollout_id`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slime.data.columns import token_versions
from slime.protocols import UNKNOWN_VERSION
from slime.rollout.stream.groups import Drawn
from slime.types import Sample


def figures(cut: Sequence[Drawn], rollout_id: int, allowed: int, *, masks: bool) -> dict[str, float]:
    """Metrics of a batch. `masks`: tokens that are more than `allowed` updates behind are not trained on.

    mean, max: of the age of each sample's oldest token. over_limit: the number of samples with a token beyond
    `allowed`. Of trained tokens: token_mean, the mean of their age, and the shares token_over_limit_frac, beyond
    `allowed`, and token_unknown_frac, of an unknown version. Such a token counts as the oldest of its sample.
    """
    oldest: list[int] = []
    of_trained, unknown = [np.zeros(0, np.int64)], 0
    for drawn in cut:
        for sample in drawn.group:
            known = [version for version in sample.weight_versions if isinstance(version, int)]
            oldest.append(max(0, rollout_id - min(known, default=drawn.version)))
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


def _trained(sample: Sample) -> np.ndarray:
    """bool [R], of response tokens."""
    if sample.remove_sample:
        return np.zeros(sample.response_length, bool)
    return (
        np.ones(sample.response_length, bool)
        if sample.loss_mask is None
        else np.array(sample.loss_mask, bool)
    )


def _train_on(sample: Sample, tokens: np.ndarray) -> None:
    """Train on these tokens alone, bool [R]."""
    sample.loss_mask = tokens.astype(int).tolist()
    sample.remove_sample |= not tokens.any()
