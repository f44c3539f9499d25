"""Chooses an operator's cases for the short suite: every two values of a test's parameters occur together once."""

from __future__ import annotations

from itertools import combinations

import pytest

MANY = 4
"""Number of cases up to which a test runs all its cases."""

Pair = frozenset[tuple[str, int]]


def pairs_of(case: pytest.Function) -> set[Pair]:
    values = [(name, id(value)) for name, value in case.callspec.params.items()]
    return {frozenset(pair) for pair in combinations(values, 2)}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the other cases slow. Each choice is the case with the most new pairs, and the first of equal cases."""
    of_test: dict[str, dict[pytest.Function, set[Pair]]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and len(item.callspec.params) > 1:
            of_test.setdefault(item.nodeid.partition("[")[0], {})[item] = pairs_of(item)
    for left in of_test.values():
        if len(left) <= MANY:
            continue
        while left:
            taken = max(left, key=lambda case: len(left[case]))
            if not (met := left.pop(taken)):
                taken.add_marker(pytest.mark.slow)
                continue
            for case in left:
                left[case] -= met
