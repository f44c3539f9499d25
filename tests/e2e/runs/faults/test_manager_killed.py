"""`vime train` with engines goes on after its rollout manager was killed: nothing is lost, doubled or too stale."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from deadly_hooks import order
from train_fixtures import World, launched, make_world, rows, samples, vime

from slime.tracking.journal import read_events
from slime.tracking.ledger import read_ledger

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
ROLLOUTS = 6


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_run_goes_on_with_its_engines(world: World, staleness: int) -> None:
    """The manager is killed in the first rollout, with a saved position that the driver does not use, and while it
    computes a reward."""
    name = f"stale-{staleness}"
    run_dir = world.root / name
    for moment in ("reward-2", "log-2", "reward-18"):
        order(run_dir, moment)
    flags = [
        *world.grpo(name, rollouts=ROLLOUTS),
        *("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", "--max-staleness", str(staleness)),
        *("--save", str(run_dir / "checkpoint"), "--save-interval", "4", "--check-weight-update-equal"),
        *("--custom-rm-path", "deadly_hooks.reward", "--rollout-snapshot-s", "0.2"),
        *("--custom-rollout-log-function-path", "deadly_hooks.in_log"),
    ]
    with launched(vime("train", *flags), world.root / f"{name}.out") as launch:
        assert launch.finish(400) == 0, launch.output[-3000:]
        assert "Traceback" not in launch.output, launch.output[-3000:]
        assert launch.output.count("the rollout manager is back after") == 3
    assert sorted(rows(run_dir, "train/step")) == list(range(ROLLOUTS))
    assert [event["rollout"] for event in read_events(run_dir, ("step",))] == list(range(ROLLOUTS))
    ledger = read_ledger(run_dir)
    assert ledger.is_exact and ledger.starts == 1 and ledger.again > 0 and ledger.over_limit == 0
    states = [event["state"] for event in read_events(run_dir, ("engine",))]
    assert states.count("serving") == 1 and "dead" not in states
    for step in range(ROLLOUTS):
        versions = [version for s in samples(run_dir, step) for version in s["weight_versions"]]
        assert step - staleness <= min(versions) and max(versions) <= step, step
    seconds = [event["seconds"] for event in read_events(run_dir, ("manager_restarted",))]
    print(f"{name}: restarts took {seconds} s, load {os.getloadavg()[0]:.1f}")
