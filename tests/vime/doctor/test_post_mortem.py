"""`vime doctor RUN_DIR` names why a run ended. The journals are those of real runs of a tiny model on CPUs.

engine          its server was killed whenever it started, after the third step
no-memory       a hook of the trainer allocated 32 PiB
not-finite      --lr 1e30
full-disk       the run directory was a tmpfs of 150 KiB
wrong-data      a reward that raises for the labels of the data
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from slime.tracking.run_record import recorded
from vime.doctor.command import main
from vime.doctor.finding import Finding
from vime.doctor.post_mortem import check_end

JOURNALS = Path(__file__).parent / "journals"
CAUSES = {
    "engine": "engine killed: RuntimeError: engine http://",
    "no-memory": "out of memory: trainer-0 failed: RuntimeError:",
    "not-finite": "values that are not finite: trainer-0 failed: DivergedError:",
    "full-disk": "full disk: ",
    "wrong-data": "wrong data: rollout failed: ValueError: reward ",
}


def end(run_dir: Path) -> Finding:
    return check_end(run_dir)[0]


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_of_a_fault_is_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(JOURNALS / f"{name}.jsonl", tmp_path / "events.jsonl")
    assert main([str(tmp_path)]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("problem  end of the run") and CAUSES[name] in first
    assert " trained of " in first and "; remedy: " in first


def test_an_unknown_cause_is_the_error_itself(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), recorded(tmp_path, rollouts=3):
        print(1 / 0)
    found = end(tmp_path)
    assert found.status == "problem" and found.found.startswith(
        "ZeroDivisionError: division by zero (no rollout"
    )


def test_a_run_that_finished_or_was_interrupted(tmp_path: Path) -> None:
    with recorded(tmp_path, rollouts=1) as events:
        events.add("start", rollout=0)
        events.add("step", rollout=0)
        events.close()
        assert end(tmp_path).found.startswith("it goes on (1 rollouts trained of 1); newest event ")
    assert (end(tmp_path).status, end(tmp_path).found) == ("ok", "finished (1 rollouts trained of 1)")
    with pytest.raises(KeyboardInterrupt), recorded(tmp_path, rollouts=1):
        raise KeyboardInterrupt
    assert end(tmp_path).status == "warning"


def test_engines_that_died_and_warnings_are_told(tmp_path: Path) -> None:
    shutil.copy(JOURNALS / "engine.jsonl", tmp_path / "events.jsonl")
    deaths, warnings = check_end(tmp_path)[1:]
    assert deaths.name == "engines that died" and deaths.found.startswith("engine-0 ")
    assert warnings.name == "warnings" and "by vime.pool.pool: " in warnings.found


def test_a_directory_without_a_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"RUN_DIR must have events.jsonl, got none in"):
        main([str(tmp_path)])
