"""The progress of a run under faults, read from its journal while the run is running."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from slime.tracking.journal import Tail
from slime.tracking.kinds import EVENTS_FILE

_KINDS = ("step", "batch")


@dataclass
class Progress:
    """(rollout, time) for each end of a step, and for each finished batch."""

    steps: list[tuple[int, float]] = field(default_factory=list)
    batches: list[tuple[int, float]] = field(default_factory=list)

    @property
    def trained(self) -> int:
        """Returns the number of the newest trained rollout, plus 1."""
        return self.steps[-1][0] + 1 if self.steps else 0

    def recovered(self, since: float, more: int) -> float | None:
        """Returns the end of the step that is `more` steps after the first step whose batch was made after `since`."""
        ends: dict[int, float] = {}
        for rollout, at in self.batches:
            if at <= since:
                continue
            if end := next((end for trained, end in self.steps if trained == rollout and end > at), None):
                ends.setdefault(rollout, end)
        return sorted(ends.values())[more] if len(ends) > more else None


class ProgressReader:
    """Reads the new events of a run's journal at each call."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._progress = run_dir, Progress()
        self._tail: Tail | None = None

    def read(self) -> Progress:
        """Returns the progress until now. It is empty before the run has a journal."""
        if self._tail is None:
            if not (self._run_dir / EVENTS_FILE).is_file():
                return self._progress
            self._tail = Tail(self._run_dir, _KINDS)
        for event in self._tail.new():
            at = event["rollout"], event.time
            (self._progress.steps if event.kind == "step" else self._progress.batches).append(at)
        return self._progress

    def close(self) -> None:
        if self._tail is not None:
            self._tail.close()
