"""The metrics of a rollout's episodes: the environment's own numbers, such as the parts of its reward."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from slime.environments.rows import KEY
from slime.types import Sample


def figures(samples: Iterable[Sample]) -> dict[str, float]:
    """Returns environment/NAME, the mean of each number over the episodes that have it. Empty without episodes."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.metadata.get(KEY, {}).get("metrics", {}).items():
            found.setdefault(f"environment/{name}", []).append(value)
    return {name: statistics.fmean(values) for name, values in sorted(found.items())}
