"""Tests `vime doctor` on the machine of the tests: exit status, lines, JSON; a check that breaks hides no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vime.cli import main
from vime.doctor import command
from vime.doctor.finding import Finding, WantedRun, ok, problem, warning
from vime.doctor.machine import Machine

ROOT = Path(__file__).parents[3]


def doctor(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vime", "doctor", *argv], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.timeout(60)
def test_this_machine_can_run_the_tests():
    done = doctor("--json", "--device", "cpu")
    findings = json.loads(done.stdout)
    assert {"name", "status", "found", "remedy"} == set(findings[0])
    problems = [finding for finding in findings if finding["status"] == "problem"]
    assert (done.returncode, problems) == (0, [])
    assert {"torch", "vllm plugin", "shared memory", "ports", "ray cluster"} <= {f["name"] for f in findings}


def test_a_problem_is_exit_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "nowhere")
    assert main(["doctor", "--device", "cpu", "--run-dir", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("problem")]
    assert "RAY_ADDRESS=nowhere names no host and port; remedy: set RAY_ADDRESS to HOST:6379" in line
    assert lines[-1].startswith("1 problem, ") and lines[-1].endswith(": a run on cpu would fail")


def test_a_check_that_breaks_hides_no_other(monkeypatch):
    def check_odd(machine: Machine, wanted: WantedRun) -> list[Finding]:
        raise KeyError("strange")

    monkeypatch.setattr(command, "CHECKS", (check_odd, lambda machine, wanted: [ok("next", "ran")]))
    odd, following = command.examine(Machine(), WantedRun())
    assert (odd.status, odd.name, following.name) == ("warning", "odd", "next")
    assert "KeyError: 'strange'" in odd.found


def test_report_is_aligned_and_counts():
    lines = command.report(
        [ok("a", "x"), warning("bcd", "y", "do z"), problem("e", "v", "do w")], "good", "bad"
    )
    assert lines == [
        "ok       a    x",
        "warning  bcd  y; remedy: do z",
        "problem  e    v; remedy: do w",
        "1 problem, 1 warning: bad",
    ]
    assert command.report([ok("a", "x")], "good", "bad")[-1] == ("0 problems, 0 warnings: good")
