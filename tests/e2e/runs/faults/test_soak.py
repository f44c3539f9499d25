"""Runs the short form of scripts/soak.sh: each fault occurs once, and the ledger is exact."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from soak_faults import ENDING, FAULTS

ROOT = Path(__file__).parents[4]
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_every_fault_once_loses_no_group_and_trains_none_twice(tmp_path: Path) -> None:
    """Recoveries have long limits, because other tests run on the same cores. On quiet cores a step takes half a
    second, and a lost reply takes 30 s."""
    record = tmp_path / "soak.json"
    command = [sys.executable, str(ROOT / "scripts/soak.py"), "--steps", "240", "--every", "11"]
    command += ["--quiet-steps", "100", "--median-s", "120", "--worst-s", "300"]
    where = ["--work", str(tmp_path / "work"), "--out", str(record)]
    done = subprocess.run([*command, *where], capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr
    soak = json.loads(record.read_text(encoding="utf-8"))
    assert {strike["kind"] for strike in soak["strikes"]} | soak["left_out"].keys() == FAULTS.keys()
    ended = {strike["kind"] for strike in soak["strikes"] if strike["restarted"]}
    assert ended >= set(ENDING) and not ended & {"engine", "router"}
