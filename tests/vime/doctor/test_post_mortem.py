"""`vime doctor RUN_DIR` names why a run ended. The journals are those of real runs of a tiny model on CPUs.

engine          its server was killed whenever it started, after the third step
no-memory       a hook of the trainer allocated 32 PiB
not-finite      --lr 1e30
full-disk       the run directory was a tmpfs of 150 KiB
wrong-data      a reward that raises for the labels of the data
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from slime.tracking.run_record import recorded
from slime.tracking.run_summary import RunSummary
from vime.doctor.command import main
from vime.doctor.finding import Finding, ok, problem, warning
from vime.doctor.post_mortem import CAUSES as CAUSE_TABLE
from vime.doctor.post_mortem import check_end, find_cause, verdict

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


ORDER = [
    # Two causes of the table fit each error. A row's first entry is the right cause.
    ("no permission", "PermissionError", "[Errno 13] Permission denied: '/data/prompts.jsonl'"),
    (
        "no permission",
        "ValueError",
        "--save must be a directory that this user can write to and lock, got /x",
    ),
    ("no permission", "OSError", "[Errno 30] Read-only file system: '/run/metrics.jsonl'"),
    (
        "no permission",
        "ValueError",
        "--run-dir must be a directory that this user can write to, got x.jsonl: Permission",
    ),
    (
        "run directory removed",
        "ValueError",
        "--run-dir must exist while its run is active, got /x, which was removed",
    ),
    ("full disk", "OSError", "[Errno 28] No space left on device: '/run/samples/3.jsonl'"),
    ("full disk", "ValueError", "--run-dir must have room for the records of a run, got 0 bytes; reward"),
    ("a process of Ray ended", "RayLost", "gcs_server has ended: engine http://127.0.0.1:1 died"),
    ("out of memory", "ActorError", "trainer-0 died: the kernel has killed 1 process of the run for memory"),
    ("process killed", "ActorError", "rollout died without an error of its own; its engine exited"),
    ("engine killed", "RuntimeError", "engine http://127.0.0.1:1 died with --prompt-data x.jsonl"),
    (
        "values that are not finite",
        "DivergedError",
        "train/loss must be finite, got nan; lower --lr or look at reward",
    ),
    ("wrong data", "ValueError", "--prompt-data x.jsonl:3: label must be a number"),
    ("KeyError", "KeyError", "events.jsonl and metrics.jsonl"),
]


@pytest.mark.parametrize(("cause", "kind", "text"), ORDER)
def test_the_first_cause_that_fits_is_named(tmp_path: Path, cause: str, kind: str, text: str) -> None:
    """The error of a read-only run directory names metrics.jsonl, but its cause is not "wrong data"."""
    assert find_cause(RunSummary(tmp_path, state="failed", error_type=kind, cause=text)).name == cause


def test_each_cause_of_the_table_has_a_case() -> None:
    assert {cause.name for cause in CAUSE_TABLE} <= {cause for cause, _, _ in ORDER}


def test_an_unknown_cause_is_the_error_itself(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), recorded(tmp_path, rollouts=3):
        print(1 / 0)
    found = end(tmp_path)
    assert found.status == "problem" and found.found.startswith(
        "ZeroDivisionError: division by zero (no rollout"
    )


def test_the_last_line_follows_from_the_findings() -> None:
    """The line for a finished run that learned nothing must not report a failure or damaged records."""
    finished, failed = ok("end of the run", "finished"), problem("end of the run", "full disk", "")
    equal, lost = problem("gradient 0", "from rollout 2", ""), problem("lost groups", "3", "")
    run, slow = Path("runs/k9"), warning("warnings", "1", "")
    assert verdict(run, [finished, equal, slow], []) == "the run in runs/k9 learns nothing: gradient 0"
    assert verdict(run, [failed, problem("memory", "80 GiB", "")], []) == "the run in runs/k9 failed"
    assert (
        verdict(run, [finished], [lost]) == "the records of the run in runs/k9 are not in order: lost groups"
    )
    assert verdict(run, [failed, equal], [lost]).split("; ") == [
        "the run in runs/k9 failed",
        "the run in runs/k9 learns nothing: gradient 0",
        "the records of the run in runs/k9 are not in order: lost groups",
    ]


def test_the_remedy_names_the_line_of_the_users_code(tmp_path: Path) -> None:
    text = "rollout failed: RuntimeError: --custom-generate-function-path my.f failed: KeyError: 'x' (at /u/my.py:12)"
    with pytest.raises(RuntimeError), recorded(tmp_path, rollouts=3):
        raise RuntimeError(text)
    found = end(tmp_path)
    assert "(at /u/my.py:12)" in found.found and found.remedy.startswith("look at /u/my.py:12; see ")


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


def test_losses_of_the_trainer_have_times_and_repeated_steps(tmp_path: Path) -> None:
    with recorded(tmp_path, rollouts=9) as events:
        events.add("trainer_lost", rollout=3, phase="training rollout 3", text="trainer-0 failed")
        assert "1, not restarted; 0 steps were repeated with the same data" in [
            one.found for one in check_end(tmp_path)
        ]
        events.add("trainer_restarted", rollout=1, repeated=2, seconds=4.2)
        events.add("trainer_lost", rollout=5, phase="publishing weights 5", text="trainer-0 failed")
        events.add("trainer_restarted", rollout=4, repeated=1, seconds=11.6)
    lost = next(one for one in check_end(tmp_path) if one.name == "losses of the trainer")
    assert lost.found == "2, restarted in 4 to 12 s; 3 steps were repeated with the same data"


def test_losses_of_the_rollout_manager_have_times(tmp_path: Path) -> None:
    with recorded(tmp_path, rollouts=9) as events:
        events.add("manager_lost", rollout=3, text="rollout failed")
        assert "1, not restarted" in [one.found for one in check_end(tmp_path)]
        events.add("manager_restarted", rollout=3, seconds=4.2)
    lost = next(one for one in check_end(tmp_path) if one.name == "losses of the rollout manager")
    assert lost.found == "1, restarted in 4 to 4 s"


def test_a_directory_without_a_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"RUN_DIR must have events.jsonl, got none in"):
        main([str(tmp_path)])


def interrupted(run_dir: Path, trained: int, saved: int | None, save: Path | None) -> Finding:
    """Returns doctor's findings for a run that trained `trained` rollouts, and whose newest checkpoint is of rollout
    `saved`."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.json").write_text(
        json.dumps({"checkpoint": {"save": None if save is None else str(save)}})
    )
    with pytest.raises(KeyboardInterrupt), recorded(run_dir, rollouts=9) as events:
        events.add("start", rollout=0)
        for rollout in range(trained):
            events.add("step", rollout=rollout)
            if rollout == saved:
                events.add("checkpoint", rollout=rollout)
        raise KeyboardInterrupt
    return end(run_dir)


def checkpoints(folder: Path, newest: int) -> Path:
    iteration = folder / f"iter_{newest:07d}"
    iteration.mkdir(parents=True)
    (iteration / "metadata.json").touch()
    (folder / "latest_checkpointed_iteration.txt").write_text(str(newest))
    return folder


@pytest.mark.parametrize(
    ("trained", "newest", "remedy"),
    [
        (0, None, "no rollout was trained, so the same command begins anew"),
        (1, None, "it cannot be resumed, and rollout 0 must be trained again: no checkpoint is in "),
        (4, None, "it cannot be resumed, and rollouts 0 to 3 must be trained again: no checkpoint is in "),
        (4, 3, " resumes it after rollout 3, and no trained rollout is lost"),
        (4, 2, " resumes it after rollout 2, and rollout 3 is trained again"),
        (4, 1, " resumes it after rollout 1, and rollouts 2 to 3 are trained again"),
    ],
)
def test_whether_an_interrupted_run_can_be_resumed(
    tmp_path: Path, trained: int, newest: int | None, remedy: str
) -> None:
    save = tmp_path / "save"
    if newest is not None:
        checkpoints(save, newest)
    found = interrupted(tmp_path / "run", trained, newest, save)
    assert found.status == "warning" and remedy in found.remedy
    assert (f"--load {save}" in found.remedy) == (newest is not None)
    gone = interrupted(tmp_path / "elsewhere", trained, newest, tmp_path / "absent")
    assert ("is not here; with it, the same command" in gone.remedy) == (newest is not None)
    without = interrupted(tmp_path / "without", trained, None, None)
    assert ("the command had no --save" in without.remedy) == (trained > 0)


def test_checkpoints_of_another_run_resume_nothing(tmp_path: Path) -> None:
    """The run was started with --overwrite and has saved nothing yet."""
    found = interrupted(tmp_path / "run", 2, None, checkpoints(tmp_path / "save", 90))
    assert found.remedy.startswith("it cannot be resumed")


@pytest.mark.parametrize("name", CAUSES)
def test_no_cause_promises_a_resume_that_is_not_there(name: str, tmp_path: Path) -> None:
    shutil.copy(JOURNALS / f"{name}.jsonl", tmp_path / "events.jsonl")
    remedy = end(tmp_path).remedy
    assert "--load" not in remedy
    assert "it cannot be resumed" in remedy or "no rollout was trained" in remedy
    (tmp_path / "config.json").write_text(
        json.dumps({"checkpoint": {"save": str(checkpoints(tmp_path / "save", 0))}})
    )
    if "no rollout was trained" not in remedy:
        assert f"--load {tmp_path / 'save'} resumes it after rollout 0" in end(tmp_path).remedy
