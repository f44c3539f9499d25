"""Tests a snapshot of a process that SIGKILL has ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_snapshots import ONE, Saved, _ends_runs, restored, resume, until

from slime.rollout.stream.snapshot_file import NAME, SnapshotFile
from slime.tracking.ledger import read_ledger

__all__ = ["_ends_runs"]


def roll_until_killed(folder: str) -> None:
    """Runs in the process that is killed: snapshots every 10 ms, while one group waits for its engine."""
    run = Saved(Path(folder))
    run.snapshots.start(0.01)
    first, _ = run.ask(0, 0), run.ask(1, 0)
    first()
    run.save(0)
    run.state.events.add("step", rollout=0)
    time.sleep(60)


@pytest.mark.slow
def test_a_manager_that_is_killed_with_sigkill_leaves_its_tokens(tmp_path):
    here = Path(__file__).parent
    code = f"import test_snapshots_killed; test_snapshots_killed.roll_until_killed({str(tmp_path)!r})"
    path = os.pathsep.join([str(here), str(here.parents[1]), *sys.path])
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path})
    try:
        newest = SnapshotFile(tmp_path / "run" / NAME)

        def has_group() -> bool:
            position = tmp_path / "rollout" / "data_state_0.json"
            return position.exists() and newest.load() is not None and 3 in newest.lines

        assert until(has_group, 60)
    finally:
        process.kill()
        process.wait()
    again = resume(tmp_path)
    assert again.train(1, 1) == [ONE, "d"] and restored(tmp_path) == [(3, 8)]
    assert read_ledger(tmp_path / "run").is_exact
