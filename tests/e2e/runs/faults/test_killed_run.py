"""A run whose processes are all killed with SIGKILL resumes with the tokens of its last snapshot."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fault_cases import killed_with_a_snapshot
from train_fixtures import World, make_world


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_tokens_of_its_snapshot(world: World) -> None:
    killed_with_a_snapshot(world)
