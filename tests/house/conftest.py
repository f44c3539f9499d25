"""Frees the syntax trees of the repository after the last house test of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from house_tree import forget_trees


@pytest.fixture(scope="package", autouse=True)
def trees() -> Iterator[None]:
    yield
    forget_trees()
