"""Tests how a soak starts a run again, and how it ends with a run that fails without a fault. The run is a small
program that writes a journal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.tracking.ledger import read_ledger
from vime.soak.parts import Descendants
from vime.soak.plan import Planned
from vime.soak.runner import BrokenRunError, Job, Runner

PROGRAM = """
import sys, time
from pathlib import Path
from slime.tracking.events import Events
from slime.tracking.run_record import recorded

run_dir, steps, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
saved = run_dir / "saved"
first = int(saved.read_text()) + 1 if saved.exists() else 0
rollout = Events("rollout", str(run_dir))
with recorded(run_dir, steps) as driver:
    driver.add("start", rollout=first)
    for step in range(first, steps):
        rollout.add("drawn", groups=[step], version=step)
        rollout.add("batch", rollout=step, groups=[step], over_limit=0)
        time.sleep(0.15)
        driver.add("step", rollout=step)
        if step == 2:
            saved.write_text(str(step))
        if step == last:
            print("the program ends here", flush=True)
            sys.exit(3)
        if step == -last:
            time.sleep(600)
"""


@pytest.fixture
def started() -> Iterator[Descendants]:
    found = Descendants()
    yield found
    found.end()


def make_job(folder: Path, *, steps: int, last: int = 99, stall_s: float = 30.0) -> Job:
    run_dir = folder / "run"
    run_dir.mkdir()
    command = [sys.executable, "-c", PROGRAM, str(run_dir), str(steps), str(last)]
    return Job(
        command=command,
        resume=lambda: command if (run_dir / "saved").exists() else None,
        resuming=["driver"],
        run_dir=run_dir,
        log=folder / "output.log",
        first=0,
        steps=steps,
        staleness=0,
        stall_s=stall_s,
    )


def test_a_killed_run_starts_again_after_its_first_checkpoint(tmp_path: Path, started: Descendants) -> None:
    """The fault is planned for step 1, and waits for the checkpoint of step 2."""
    runner = Runner(make_job(tmp_path, steps=12), [Planned(1, "driver")], started, None, seed=0)
    runner.finish()
    runner.close()
    (strike,) = runner.observed.strikes
    assert strike.recovery_s is not None and strike.recovery_s > 0.15 and strike.restarts == 1
    assert runner.observed.starts == 2 and not runner.plan
    ledger = read_ledger(tmp_path / "run")
    assert ledger.starts == 2 and ledger.is_exact and ledger.trained == set(range(12)) and ledger.again > 0


def test_a_run_that_ends_without_a_fault_is_broken(tmp_path: Path, started: Descendants) -> None:
    runner = Runner(make_job(tmp_path, steps=9, last=1), [Planned(3, "driver")], started, None, seed=0)
    with pytest.raises(BrokenRunError, match="exit code 3 without a fault.*\n.*the program ends here"):
        runner.finish()
    runner.close()
    assert runner.observed.starts == 1 and not runner.observed.strikes


def test_a_run_that_stops_making_steps_is_broken(tmp_path: Path, started: Descendants) -> None:
    job = make_job(tmp_path, steps=9, last=-1, stall_s=1.5)
    runner = Runner(job, [], started, None, seed=0)
    with pytest.raises(BrokenRunError, match=r"no step for \d s; look at"):
        runner.finish()
    runner.close()
