"""The short form of scripts/soak.sh: every fault once, and the ledger is exact."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_every_fault_once_loses_no_group_and_trains_none_twice(tmp_path: Path) -> None:
    record = tmp_path / "soak.json"
    command = [sys.executable, str(ROOT / "scripts/soak.py"), "--steps", "64", "--every", "8"]
    where = ["--work", str(tmp_path / "work"), "--out", str(record), "--worst-s", "120"]
    done = subprocess.run([*command, *where], capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stdout + done.stderr
    strikes = json.loads(record.read_text(encoding="utf-8"))["strikes"]
    assert len({strike["kind"] for strike in strikes}) == 8
    assert {s["kind"] for s in strikes if s["restarted"]} >= {"trainer", "manager", "driver"}
