"""A long wait reports its reason; a short wait reports nothing."""

from __future__ import annotations

import time

from slime.system import waiting


def test_a_long_wait_is_said(monkeypatch, capsys):
    monkeypatch.setattr(waiting, "_SAY_AFTER_S", 0.1)
    monkeypatch.setattr(waiting, "_SAY_EVERY_S", 60.0)
    with waiting.report_wait("sending weights to the engines"):
        time.sleep(0.5)
    assert capsys.readouterr().err == "note: still sending weights to the engines, for 0 s\n"
    with waiting.report_wait("saving"):
        pass
    time.sleep(0.3)
    assert capsys.readouterr().err == ""


def test_a_wait_that_goes_on_repeats_what_it_waits_for(monkeypatch, capsys):
    monkeypatch.setattr(waiting, "_SAY_AFTER_S", 0.1)
    monkeypatch.setattr(waiting, "_SAY_EVERY_S", 0.1)
    with waiting.report_wait("starting") as wait:
        wait.on = "the trainer"
        time.sleep(0.25)
        wait.on = "the engines (runs/a/logs/engine-*.log)"
        time.sleep(0.25)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "note: still starting, for 0 s; it waits for the trainer" and len(lines) >= 3
    assert lines[-1].endswith("; it waits for the engines (runs/a/logs/engine-*.log)")
