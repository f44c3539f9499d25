"""A run is killed after its last rollout, together with its watchdog. The next start of the command ends its
records."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from config_cases import good_argv
from rollout_double import make_tokenizer

from slime.tracking.run_record import RESERVE
from slime.tracking.run_summary import run_summary
from vime.doctor.post_mortem import check_end
from vime.run.late_end import end_late
from vime.run.temporary import SHARED_MEMORY, left_weights

DRIVER = """
import os, signal, sys
from contextlib import ExitStack
from pathlib import Path
from slime.tracking.run_record import recorded
from vime.run.lock import lock
from vime.run.temporary import SHARED_MEMORY, make_weights_folder
run_dir, trained, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
with ExitStack() as stack:
    lock("--run-dir", run_dir, stack)
    events = stack.enter_context(recorded(run_dir, rollouts=3))
    folder = make_weights_folder(SHARED_MEMORY, run_dir, stack)
    for version in (2, 3):
        (folder / f"weights-{version}").write_bytes(bytes(1 << 20))
    events.add("start", rollout=0)
    for rollout in range(trained):
        events.add("step", rollout=rollout)
    if how == "error":
        events.add("error", type="OSError", text="the last save", log="logs/driver.log")
    print(folder, flush=True)
    if how == "goes on":
        sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(run_dir: Path, trained: int = 3, how: str = "killed") -> Path:
    """Returns the folder of weights that a run's driver left when it was killed."""
    command = [sys.executable, "-c", DRIVER, str(run_dir), str(trained), how]
    driver = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert driver.returncode == -signal.SIGKILL
    return Path(driver.stdout.strip())


def test_the_next_start_of_a_finished_run_ends_it(tmp_path: Path) -> None:
    run_dir, checkpoint = tmp_path / "run", tmp_path / "checkpoint"
    left = killed(run_dir)
    assert run_summary(run_dir).state == "failed" and left.is_dir()
    found = {finding.name: finding for finding in check_end(run_dir)}
    assert found["end of the run"].found.startswith("driver killed")
    assert found["shared memory"].found == f"2 MiB of weights in {left}, left by a run that was killed"
    (checkpoint / "iter_0000002").mkdir(parents=True)
    (checkpoint / "iter_0000002" / "metadata.json").touch()
    (checkpoint / "latest_checkpointed_iteration.txt").write_text("2")
    places = ("--run-dir", run_dir, "--load", checkpoint, "--save", checkpoint)
    command = [sys.executable, "-m", "vime", "train", *good_argv(tmp_path), *map(str, places)]
    model = tmp_path / "model"
    make_tokenizer().save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 512}))
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0 and "all 3 rollouts are done" in again.stdout, again.stderr
    assert run_summary(run_dir).state == "finished" and not left.exists() and not (run_dir / RESERVE).exists()
    assert [finding.name for finding in check_end(run_dir)] == ["end of the run"]


@pytest.mark.parametrize(("trained", "how"), [(2, "killed"), (3, "error")])
def test_a_run_that_failed_stays_failed(tmp_path: Path, trained: int, how: str) -> None:
    left = killed(tmp_path / "run", trained, how)
    end_late(tmp_path / "run")
    assert run_summary(tmp_path / "run").state == "failed" and not left.exists()


def test_a_run_that_goes_on_is_left_alone(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-c", DRIVER, str(run_dir), "3", "goes on"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None and driver.stdin is not None
        folder = Path(driver.stdout.readline().strip())
        assert left_weights(SHARED_MEMORY, run_dir) == []
        end_late(run_dir)
        assert run_summary(run_dir).state == "running" and folder.is_dir()
        driver.stdin.close()
    assert left_weights(SHARED_MEMORY, run_dir) == [folder]
    end_late(run_dir)
    assert run_summary(run_dir).state == "finished" and not folder.exists()


def test_a_directory_that_no_run_has_used_stays_as_it_is(tmp_path: Path) -> None:
    end_late(tmp_path / "new")
    assert not (tmp_path / "new").exists()
