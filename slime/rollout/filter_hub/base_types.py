"""This module defines the result of a dynamic-sampling filter (`--dynamic-sampling-filter-path`)."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from dataclasses import dataclass

from slime.hooks import Hook
from slime.types import SampleGroup


@dataclass
class DynamicFilterOutput:
    """The decision of a filter: `keep` is true if the group is trained on."""

    keep: bool
    reason: str | None = None
    """Suffix of the metric that counts dropped groups: rollout/dynamic_filter/drop_{reason}."""
    keep_when_insufficient: bool = False
    """Keep a rejected group if the rollout would otherwise need more prompts to fill its batch."""


def call_dynamic_filter(
    fn: Hook | None, args: Namespace, group: SampleGroup, **kwargs: object
) -> DynamicFilterOutput:
    """Runs a filter. Without a filter, every group is kept. A bool result (Python, NumPy or torch) is wrapped in the
    record.

    Raises ValueError for any other result.
    """
    if fn is None:
        return DynamicFilterOutput(keep=True)
    output = fn(args, group, **kwargs)
    if isinstance(output, DynamicFilterOutput):
        return output
    if output is None or isinstance(output, (str, list, tuple, dict)):
        raise ValueError(
            "--dynamic-sampling-filter-path must return DynamicFilterOutput or bool, got "
            f"{type(output).__name__}"
        )
    return DynamicFilterOutput(keep=bool(output))


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, remaining_batch_size: int, target_data_size: int
) -> bool:
    """Returns True if a rollout drops the group of `output`.

    `remaining_batch_size` is the number of groups that are kept or may still be kept, including this group. A rejected
    group with `keep_when_insufficient` stays if dropping it would leave fewer than `target_data_size` groups.
    """
    return not (output.keep or (output.keep_when_insufficient and remaining_batch_size <= target_data_size))


class MetricGatherer:
    """Counts the groups that filters drop, by reason, under the names of metrics."""

    def __init__(self) -> None:
        self.drops: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        """Counts a dropped group. A group without a reason is not counted."""
        if reason:
            self.drops[reason] += 1

    def collect(self) -> dict[str, int]:
        """Returns rollout/dynamic_filter/drop_{reason} for every reason, sorted."""
        return {
            f"rollout/dynamic_filter/drop_{reason}": count for reason, count in sorted(self.drops.items())
        }
