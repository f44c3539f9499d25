"""Tests the two parts of a pool's start: `launch` starts the processes, and `wait_ready` lets them take devices."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from engine_double import DoubleServer
from test_engine_pool import Doubles, die, wait_for


class Recording(DoubleServer):
    """A double that records its calls in a list that all doubles share."""

    calls: list[tuple[str, int, bool]] = []

    def start(self) -> str:
        self.calls.append(("start", self.spec.index, self.spec.waits))
        return super().start()

    def open_gate(self) -> None:
        self.calls.append(("open", self.spec.index, self.gate_is_open))
        super().open_gate()
        assert self.gate_is_open == self.spec.waits

    def wait_ready(self) -> None:
        self.calls.append(("ready", self.spec.index, self.gate_is_open))
        super().wait_ready()

    @property
    def gate_is_open(self) -> bool:
        return Path(f"{self.spec.log_path}.gate").exists()


def test_gates_open_after_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes start, then all engines take their devices. An engine that is started later does not wait."""
    monkeypatch.setattr(Recording, "calls", calls := [])
    doubles = Doubles(tmp_path, 2, spawn=Recording, waits=True)
    try:
        doubles.pool.launch()
        calls.append(("meanwhile", 0, False))
        doubles.pool.check_launched()
        doubles.pool.wait_ready()
        assert sorted(calls[:2]) == [("start", 0, True), ("start", 1, True)]
        assert calls[2] == ("meanwhile", 0, False)
        assert sorted(calls[3:5]) == [("open", 0, False), ("open", 1, False)]
        assert sorted(calls[5:]) == [("ready", 0, True), ("ready", 1, True)]
        die(doubles.pool.engine_urls[1])
        wait_for(lambda: ("start", 1, False) in calls)
        wait_for(lambda: len(doubles.pool.engine_urls) == 2)
        assert calls[-1] == ("ready", 1, False) and ("open", 1, True) not in calls
    finally:
        doubles.pool.stop()
    assert not list(tmp_path.glob("*.gate"))


def test_a_server_that_ends_before_the_wait_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recording, "calls", calls := [])
    before = set(psutil.Process().children(recursive=True))
    doubles = Doubles(tmp_path, 2, spawn=Recording, waits=True)
    started: set[psutil.Process] = set()
    try:
        doubles.pool.launch()
        started.update(set(psutil.Process().children(recursive=True)) - before)
        doubles.pool.check_launched()
        psutil.Process(doubles.pool.state.members[1].handle._process.pid).kill()
        with pytest.raises(RuntimeError, match="got exit status -9, from SIGKILL"):
            wait_for(lambda: doubles.pool.check_launched() is not None)
    finally:
        doubles.pool.stop()
    # The server that ended is asked for its error, and no gate has opened.
    assert [call for call in calls if call[0] != "start"] == [("ready", 1, False)]
    assert len(started) >= 3, "the router and two servers ran"
    _, alive = psutil.wait_procs(started, timeout=5)
    assert not alive
