"""This module removes samples from training whose rewards are not finite, such as NaN from a judge.

It counts these samples and warns about the first. Their rewards become 0, which the group's statistics include, as for
every sample with `remove_sample`.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable

from slime.records.once import warn_once
from slime.types import Sample

logger = logging.getLogger(__name__)
KEY = "removed"
"""Key in `Sample.metadata` for {"reason": ..., "said": ...} of a sample that is not trained on."""
REASON = "reward"


def remove_unless_finite(samples: Iterable[Sample], key: str | None) -> None:
    """Sets `remove_sample` of samples whose reward (its entry `key`, for a record) is not finite. Samples without a
    reward do not change. The first such sample of this process is logged, because a fault in the reward is the
    likeliest cause."""
    for sample in samples:
        reward = sample.reward
        value = reward.get(key or "") if isinstance(reward, dict) else reward
        if value is None or math.isfinite(value):
            continue
        sample.metadata[KEY] = {
            "reason": REASON,
            "said": f"a reward must be finite, got {value}; mend the reward",
        }
        sample.remove_sample = True
        warn_once(
            logger,
            "reward that is not finite",
            "a reward must be finite, got %s for sample %s of group %s, label %.80r, response %.200r; such "
            "samples are not trained on, and rollout/removed/reward counts them: mend the reward",
            *(value, sample.index, sample.group_index, sample.label, sample.response),
        )
        sample.reward = {**reward, key or "": 0.0} if isinstance(reward, dict) else 0.0


def figures(samples: Iterable[Sample]) -> dict[str, float]:
    """Returns removed/{reason}, the number of samples, or an empty dict if no sample was removed."""
    reasons = Counter(sample.metadata[KEY]["reason"] for sample in samples if KEY in sample.metadata)
    return {f"removed/{reason}": float(count) for reason, count in sorted(reasons.items())}
