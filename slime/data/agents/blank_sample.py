"""Makes the sample that a session or a record of turns fills."""

from __future__ import annotations

import copy

from slime.data import columns
from slime.types import Sample


def blank(sample: Sample) -> Sample:
    """Returns a copy of the sample without generated fields, with a copy of its metadata."""
    fresh = copy.copy(sample)
    fresh.tokens, fresh.response, fresh.response_length = [], "", 0
    fresh.loss_mask, fresh.rollout_log_probs, fresh.weight_versions = None, None, []
    columns.clear(fresh)
    fresh.spec_info, fresh.prefix_cache_info = Sample.SpecInfo(), Sample.PrefixCacheInfo()
    fresh.status, fresh.metadata = Sample.Status.PENDING, dict(sample.metadata)
    return fresh
