"""Counts the groups that a batch does not contain, and ends a run whose groups are all dropped."""

from __future__ import annotations

from slime.rollout.filter_hub.base_types import MetricGatherer
from slime.tracking.concerns import dropped_groups, end_dropped_groups
from slime.tracking.events import Events

MAX_BARREN_BATCHES = 32
"""A rollout raises an error after it has dropped this number of batches of groups in a row."""


class Drops:
    """The dropped groups of rollout `rollout_id`, whose batch has `target` groups."""

    def __init__(self, rollout_id: int, target: int, events: Events) -> None:
        self.rollout_id, self.target, self.events = rollout_id, target, events
        self.metrics = MetricGatherer()
        self.barren = 0
        """Number of groups in a row that were dropped."""

    def count(self, reason: str) -> None:
        """Counts a group. Raises RuntimeError if too many groups in a row were dropped."""
        self.metrics.on_dynamic_filter_drop(reason)
        self.barren += 1
        if (concern := dropped_groups(self.rollout_id, self.barren, self.target)) is not None:
            concern.record(self.events)
        if self.barren >= MAX_BARREN_BATCHES * self.target:
            counts = ", ".join(f"{reason}: {count}" for reason, count in self.metrics.drops.most_common())
            raise RuntimeError(
                f"--dynamic-sampling-filter-path must keep some groups, got none in {self.barren} in a "
                f"row ({counts}); check the rewards, the difficulty of the prompts, or the filter"
            )

    def end_series(self) -> None:
        """Ends a series of dropped groups: a group was kept."""
        if (concern := end_dropped_groups(self.rollout_id, self.barren, self.target)) is not None:
            concern.record(self.events)
        self.barren = 0
