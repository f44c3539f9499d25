"""Tests the parts of a start: their sum is the time since the process began."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from slime.tracking.events import Events
from slime.tracking.journal import read_events
from slime.tracking.start_times import StartTimes


def test_the_parts_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 103.0, 110.5, 110.5])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    times = StartTimes(2.0)
    times.end("checks")
    times.end("trainer")
    times.end("engines")
    events = Events("driver", str(tmp_path))
    assert times.report(events) == "started in 12.5 s: checks 5.0, trainer 7.5"
    events.close()
    monkeypatch.undo()
    (event,) = [event for event in read_events(tmp_path) if event.kind == "started"]
    assert event.fields == {"seconds": 12.5, "parts": {"checks": 5.0, "trainer": 7.5, "engines": 0.0}}


def test_the_age_of_a_process_begins_with_its_start() -> None:
    code = "import time; time.sleep(0.3)\nfrom slime.tracking.start_times import process_age; print(process_age())"
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert 0.3 <= float(done.stdout) <= time.monotonic() - begin + 0.02  # in steps of 10 ms
