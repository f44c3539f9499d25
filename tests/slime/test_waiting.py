"""A long wait says what it is for; a short one says nothing."""

from __future__ import annotations

import time

from slime import waiting


def test_a_long_wait_is_said(monkeypatch, capsys):
    monkeypatch.setattr(waiting, "_SAY_AFTER_S", 0.1)
    monkeypatch.setattr(waiting, "_SAY_EVERY_S", 60.0)
    with waiting.said("sending weights to the engines"):
        time.sleep(0.5)
    assert capsys.readouterr().err == "note: still sending weights to the engines, for 0 s\n"
    with waiting.said("saving"):
        pass
    time.sleep(0.3)
    assert capsys.readouterr().err == ""
