"""`vime train` with engines goes on after its rollout manager was killed: nothing is lost, doubled or too stale."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fault_cases import manager_killed
from train_fixtures import World, make_world

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_run_goes_on_with_its_engines(world: World, staleness: int) -> None:
    manager_killed(world, staleness)
