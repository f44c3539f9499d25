"""Runs `vime soak` with a tiny model: a short form of scripts/soak.sh, in which each fault occurs once."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from vime.soak.faults import ENDING, FAULTS

ROOT = Path(__file__).parents[4]
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_every_fault_once_loses_no_group_and_trains_none_twice(tmp_path: Path) -> None:
    """Recoveries have long limits, because other tests run on the same cores. On quiet cores a step takes half a
    second, and a lost reply takes 30 s."""
    command = ["bash", str(ROOT / "scripts/soak.sh"), "--steps", "240", "--every", "11"]
    command += ["--quiet-steps", "100", "--median-s", "120", "--worst-s", "300"]
    environ = {**os.environ, "WORK": str(tmp_path / "work")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    soak = json.loads((tmp_path / "work/run-soak/soak.json").read_text(encoding="utf-8"))
    caused = {strike["kind"] for strike in soak["strikes"]}
    assert caused == FAULTS.keys() - ({"full-disk"} if "LEFT OUT" in done.stderr else set())
    ended = {strike["kind"] for strike in soak["strikes"] if strike["restarted"]}
    assert ended >= set(ENDING) and not ended & {"engine", "router", "trainer", "manager"}
