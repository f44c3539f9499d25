"""Tests whole runs of `vime train` whose engine drafts with MiMo's layer of multi-token prediction."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from draft_cases import mimo_world, train_with_a_draft
from train_fixtures import World, rows, samples

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from mimo_world()


def test_three_steps_with_a_draft(world: World) -> None:
    run_dir = train_with_a_draft(world, 1e-5)
    found = 0
    for number, row in rows(run_dir, "rollout/step").items():
        infos = [sample["spec_info"] for sample in samples(run_dir, number)]
        accepted, drafted, passes, tokens = (
            sum(info[key] for info in infos)
            for key in (
                *("spec_accept_token_num", "spec_draft_token_num"),
                *("spec_verify_ct", "completion_token_num"),
            )
        )
        assert 0 <= accepted < drafted
        found += accepted
        assert row["rollout/spec_accept_rate"] == pytest.approx(accepted / drafted)
        assert row["rollout/spec_accept_length"] == pytest.approx(tokens / passes)
    assert found > 0  # a random draft is right once in 250 times, and there are over 2000
