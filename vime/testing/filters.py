"""Checks of a filter of groups (--dynamic-sampling-filter-path)."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Sequence

from slime.hooks import Hook, load_function
from slime.rollout.filter_hub.base_types import call_dynamic_filter
from slime.rules.resolve import resolve
from slime.types import Sample
from vime.testing.paths import function_path

REWARDS = ((0.0, 0.0), (1.0, 1.0), (0.0, 1.0), (0.5, 0.5, 0.5), (0.25, 1.0, -1.0, 0.0), (1.0,))
"""Rewards of the groups of which a filter decides if the caller gives none."""


def check_filter(
    keep: Hook | str,
    groups: Sequence[Sequence[Sample]] | None = None,
    *,
    expected: Sequence[bool] | None = None,
    **flags: object,
) -> list[bool]:
    """Calls a filter as a run does, and returns for each group whether the run trains on it.

    Args:
        keep: the function of --dynamic-sampling-filter-path, or its path.
        groups: groups of samples with rewards. Default: the groups of `REWARDS`.
        expected: the decisions.
        flags: more flags of the run, which the filter reads in `args`.

    Raises AssertionError if a decision has another type, differs in a second call, or if a call changes a sample.
    """
    path = function_path(keep, "keep")
    function = load_function(path, "keep")
    flat = resolve({"dynamic_sampling_filter_path": path, **flags}).namespace()
    decisions = []
    for number, group in enumerate(make_groups(REWARDS) if groups is None else groups):
        before = copy.deepcopy(list(group))
        first, second = (_decide(function, flat, group, number) for _ in range(2))
        assert first == second, (
            f"the filter must decide the same twice, got {first}, then {second} for group {number}"
        )
        changed = before != list(group)
        assert not changed, f"a filter must not change samples, got a change in group {number}"
        decisions.append(first)
    if expected is not None:
        assert decisions == list(expected), f"the filter must decide {list(expected)}, got {decisions}"
    return decisions


def make_groups(rewards: Sequence[Sequence[float]]) -> list[list[Sample]]:
    """Returns one group of finished samples per entry, with these rewards."""
    return [
        [
            Sample(
                group_index=number,
                index=index,
                prompt="1+1=",
                tokens=[1, 2, 3],
                response="2",
                response_length=1,
                rollout_log_probs=[-0.5],
                label="2",
                reward=reward,
                status=Sample.Status.COMPLETED,
            )
            for index, reward in enumerate(group)
        ]
        for number, group in enumerate(rewards)
    ]


def _decide(function: Hook, flat: Namespace, group: Sequence[Sample], number: int) -> bool:
    try:
        return call_dynamic_filter(function, flat, list(group)).keep
    except ValueError as error:
        raise AssertionError(f"the filter must decide about group {number}, got an error: {error}") from error
