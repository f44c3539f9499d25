"""Completes the end of a run whose processes, including its watchdog, were all killed after its last rollout."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from slime.cluster.watchdog import remove
from slime.tracking.run_record import record_end
from slime.tracking.run_summary import run_summary
from vime.run.lock import lock
from vime.run.temporary import SHARED_MEMORY, left_weights


def end_late(run_dir: Path) -> None:
    """Removes the weights that the run left in shared memory, and adds the end to its journal.

    The caller makes sure that the run's last checkpoint exists. A run that is still running is not changed, because it
    holds the lock of its directory.
    """
    if not run_dir.is_dir():
        return
    with ExitStack() as stack:
        try:
            lock("--run-dir", run_dir, stack)
            summary = run_summary(run_dir)
        except ValueError:  # another process has locked the directory, or the directory has no journal
            return
        remove([str(left) for left in left_weights(SHARED_MEMORY, run_dir)])
        trained = summary.rollout is not None and summary.rollout + 1 == summary.rollouts
        if summary.state == "failed" and not summary.error_type and trained:
            record_end(run_dir)
