"""Tests the simulation of the stream by events against times that can be computed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vime.plan.search.stream import Simulation, StreamParts

QUIET = StreamParts(
    engines=2,
    sequences=8,
    token_s=lambda count, length: 0.01,
    train_s=3.0,
    update_s=0.5,
    lengths=[(10, 400)] * 16,
)


def test_a_step_without_overlap_is_the_sum_of_its_parts() -> None:
    found = Simulation(QUIET).run(5)
    assert found.step_s == pytest.approx(4.0 + 3.0 + 0.5)
    assert found.engine == pytest.approx({"decoding": 4 / 7.5, "updating": 0.5 / 7.5, "waiting": 3 / 7.5})
    assert found.trainer == pytest.approx({"training": 3 / 7.5, "updating": 0.5 / 7.5, "waiting": 4 / 7.5})


def test_generation_that_runs_ahead_hides_training() -> None:
    assert Simulation(replace(QUIET, ahead=1)).run(10).step_s == pytest.approx(4.5, rel=0.02)


def test_engines_with_too_few_places_take_turns() -> None:
    assert Simulation(replace(QUIET, sequences=4)).run(5).step_s == pytest.approx(8.0 + 3.5)


def test_a_long_response_holds_up_the_step() -> None:
    lengths = [(10, 400)] * 15 + [(10, 1200)]
    assert Simulation(replace(QUIET, lengths=lengths)).run(5).step_s == pytest.approx(12.0 + 3.5)


def test_a_token_takes_longer_after_more_tokens() -> None:
    """A token takes 1 ms per token of the sequence's length."""
    stream = replace(QUIET, token_s=lambda count, length: 1e-3 * length)
    decoding = 1e-3 * (10 * 400 + 400**2 / 2)
    assert Simulation(stream).run(3).step_s == pytest.approx(decoding + 3.5)


def test_rewards_delay_the_batch() -> None:
    step = Simulation(replace(QUIET, reward_s=1.0), seed=3).run(20).step_s
    assert 7.5 + 1.0 < step < 7.5 + 8.0


def test_faults_lose_time_and_the_seed_decides_them() -> None:
    stream = replace(
        QUIET, engine_faults=1 / 60, trainer_faults=1 / 60, engine_repair_s=5.0, trainer_repair_s=5.0
    )
    one, same, other = (Simulation(stream, seed).run(30) for seed in (1, 1, 2))
    assert one == same != other
    assert one.step_s > Simulation(QUIET).run(30).step_s
    assert one.faults > 0 and one.engine["lost"] > 0
