"""Kills each of three writers of a queue with SIGKILL: two rollout hosts, and the trainer's rollout manager. The ledger
proves that no group is lost, trained twice, or older than --max-staleness."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from straw_processes import start_host, start_trainer, until

from slime.data.drawing.position import state_path
from slime.tracking.journal import read_events
from slime.tracking.ledger import read_ledger


def leases(folder: Path, host: str) -> int:
    """Returns the number of leases of a host so far."""
    path = folder / "run" / "events.jsonl"
    if not path.exists():
        return 0
    return sum(event.get("host") == host for event in read_events(folder / "run", ("leased",)))


def steps(folder: Path) -> int:
    path = folder / "run" / "events.jsonl"
    return len(list(read_events(folder / "run", ("step",)))) if path.exists() else 0


def test_any_of_three_writers_may_be_killed(tmp_path):
    """Host a dies first, then the manager, which starts again, and then host b. Host c joins after the deaths."""
    first, second = start_host(tmp_path, "a"), start_host(tmp_path, "b")
    manager = start_trainer(tmp_path, 0, hosts=2)
    started = [first, second, manager]

    def wait_for(condition: Callable[[], object]) -> None:
        assert until(condition), "\n".join(process.log.read_text()[-2000:] for process in started)

    try:
        wait_for(lambda: steps(tmp_path) >= 2 and leases(tmp_path, "a") and leases(tmp_path, "b"))
        first.kill()
        had = steps(tmp_path)
        wait_for(lambda: steps(tmp_path) >= had + 3)
        manager.kill()
        saved = max(n for n in range(steps(tmp_path) + 1) if state_path(str(tmp_path), n).exists())
        before = leases(tmp_path, "b")
        started.append(manager := start_trainer(tmp_path, saved + 1, hosts=1))
        wait_for(lambda: leases(tmp_path, "b") > before)  # the same process, in the manager's second start
        second.kill()
        started.append(third := start_host(tmp_path, "c"))
        wait_for(lambda: leases(tmp_path, "c") > 4)
        (tmp_path / "stop").touch()
        manager.finish()
        third.finish()
    finally:
        for process in started:
            process.kill()
    ledger = read_ledger(tmp_path / "run")
    assert ledger.is_exact and ledger.over_limit == 0 and ledger.starts == 2
    assert sorted(ledger.batches) == list(range(len(ledger.batches)))
    trained = [group for groups in ledger.batches.values() for group in groups]
    assert len(trained) == len(set(trained)) == 2 * len(ledger.batches)
    assert json.loads((tmp_path / "c.json").read_text())["answered"]
    attempts = [event.get("attempt") for event in read_events(tmp_path / "run", ("leased",))]
    assert max(attempts) > 1, "the groups of a dead host were taken over"
