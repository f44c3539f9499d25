"""The age of samples in weight updates, for functions of plug-ins that compute it. The metrics of a run are
rollout/staleness/*."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from slime.types import Sample


def sample_staleness(sample: Sample, current_weight_version: int) -> int | None:
    """Returns the age of the sample's oldest token in weight updates. Returns None if a version is missing, is no
    number, or is newer than `current_weight_version`."""
    versions = [str(version) for version in sample.weight_versions or []]
    if not versions or not all(version.removeprefix("-").isdecimal() for version in versions):
        return None
    numbers = [int(version) for version in versions]
    return None if max(numbers) > current_weight_version else current_weight_version - min(numbers)


def compute_staleness_metrics(
    samples: Sequence[Sample], current_weight_version: int | None
) -> dict[str, float | int]:
    """Returns the mean and the largest age of the samples, and the number of samples of unknown age. {} without a
    version."""
    if current_weight_version is None:
        return {}
    ages = [sample_staleness(sample, current_weight_version) for sample in samples]
    known = [age for age in ages if age is not None]
    found: dict[str, float | int] = {"staleness/unknown_count": len(ages) - len(known)}
    if known:
        found |= {"staleness/mean": statistics.fmean(known), "staleness/max": max(known)}
    return found


def fully_async_metrics_enabled(flags: object) -> bool:
    """Returns True if the rollouts run ahead of training: --max-staleness above 0, or slime's function for that."""
    ahead = int(getattr(flags, "max_staleness", None) or 0) > 0
    return ahead or "fully_async" in (getattr(flags, "rollout_function_path", None) or "")
