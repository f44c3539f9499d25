"""SIGTERM ends a run at once. With --exit-signal-handler the run saves first, as it does at Ctrl-C with --save, and a
resumed run continues with equal metrics. Checkpoints are written in the background, and two are kept."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_cases import training
from train_fixtures import World, launched, make_world, rows, run, vime

from slime.checkpoints.checkpoint_files import iterations
from slime.tracking.ledger import read_ledger
from vime.doctor.post_mortem import check_end

ROLLOUTS = 24


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


def losses(run_dir: Path) -> dict[int, float]:
    return {step: row["train/loss"] for step, row in rows(run_dir, "train/step").items()}


@pytest.fixture(scope="module")
def whole(world: World) -> dict[int, float]:
    """Returns the losses of a run without a checkpoint. SIGTERM ends the run, sent as `timeout` sends it: to the
    command and then to the group. Ray has its own handler for it."""
    with pytest.MonkeyPatch.context() as monkeypatch, training(world, "whole", monkeypatch) as launch:
        launch.wait_for(lambda: len(losses(world.root / "whole")) >= ROLLOUTS, f"{ROLLOUTS} steps", 120)
        launch.process.terminate()
        os.killpg(launch.process.pid, signal.SIGTERM)
    assert launch.process.returncode == 143
    assert launch.output.splitlines()[-1].startswith("interrupted by SIGTERM: everything"), launch.output
    return losses(world.root / "whole")


@pytest.mark.slow
def test_sigterm_of_the_group_ends_a_run_as_ctrl_c_does(whole: dict[int, float]) -> None:
    assert len(whole) >= ROLLOUTS


@pytest.mark.slow
def test_sigterm_saves_and_the_next_start_goes_on(world: World, whole: dict[int, float]) -> None:
    save = world.root / "saved"
    flags = [
        *("--save", str(save), "--load", str(save), "--save-interval", "4", "--async-save"),
        *("--exit-signal-handler", "--max-actor-ckpt-to-keep", "2"),
    ]
    command, out = vime("train", *world.sft("parts", rollouts=ROLLOUTS), *flags), world.root / "parts.out"
    with launched(command, out) as launch:
        launch.wait_for(lambda: len(losses(world.root / "parts")) > 5, "six steps", 240)
        launch.process.send_signal(signal.SIGTERM)
        assert launch.finish(60) == 143, launch.output
    assert f"been stopped; resume it with: {shlex.join(command[2:])}" in (launch.output.splitlines()[-1])
    ended = max(losses(world.root / "parts"))
    assert 5 <= ended < ROLLOUTS - 1
    assert f"saved the checkpoint of rollout {ended}, rollout {ended + 1} is the next" in launch.output
    assert launch.output.splitlines()[-1].startswith("interrupted by SIGTERM: everything"), launch.output
    assert (save / "latest_checkpointed_iteration.txt").read_text() == str(ended)
    assert iterations(save) == [(ended - 1) // 4 * 4 + 3 if ended % 4 == 0 else ended // 4 * 4 - 1, ended]
    run(command, out)
    assert losses(world.root / "parts") == {step: whole[step] for step in range(ROLLOUTS)}
    assert iterations(save) == [ROLLOUTS - 5, ROLLOUTS - 1]
    assert not list(save.glob(".iter*"))
    left = sorted(file.name for file in (save / "rollout").iterdir())
    assert left == [f"data_state_{i}.json" for i in (ROLLOUTS - 5, ROLLOUTS - 1)]


@pytest.mark.slow
def test_ctrl_c_saves_without_an_interval(world: World, whole: dict[int, float]) -> None:
    """Ctrl-C saves a checkpoint without --save-interval, so the resume that `vime doctor` reports is possible."""
    save, run_dir = world.root / "kept", world.root / "by-hand"
    flags = ["--save", str(save), "--load", str(save)]
    command, out = vime("train", *world.sft("by-hand", rollouts=ROLLOUTS), *flags), world.root / "by-hand.out"
    with launched(command, out) as launch:
        launch.wait_for(lambda: len(losses(run_dir)) > 3, "four steps", 240)
        os.killpg(launch.process.pid, signal.SIGINT)
        assert launch.finish(60) == 130, launch.output
    ended = max(losses(run_dir))
    assert "Ctrl-C: the run saves a checkpoint of its last step and ends; another Ctrl-C" in launch.output
    assert f"saved the checkpoint of rollout {ended}, rollout {ended + 1} is the next" in launch.output
    assert launch.output.splitlines()[-1].startswith("interrupted: everything"), launch.output
    (found, *_) = check_end(run_dir)
    assert found.remedy.endswith(
        f"--load {save} resumes it after rollout {ended}, and no trained rollout is lost"
    )
    run(command, out)
    assert losses(run_dir) == {step: whole[step] for step in range(ROLLOUTS)}
    assert check_end(run_dir)[0].status == "ok" and read_ledger(run_dir).is_exact


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(world: World) -> None:
    """The first Ctrl-C waits for a step whose ranks are stopped."""
    save, run_dir = world.root / "lost", world.root / "twice"
    command = vime("train", *world.sft("twice", rollouts=10_000), "--save", str(save))
    with launched(command, world.root / "twice.out") as launch:
        launch.wait_for(lambda: len(losses(run_dir)) > 3, "four steps", 240)
        (trainer,) = launch.find("ray::TrainerActor")
        os.kill(trainer, signal.SIGSTOP)
        os.kill(launch.process.pid, signal.SIGINT)
        launch.wait_for(lambda: "another Ctrl-C ends it at once" in launch.output, "its line", 30)
        time.sleep(1)
        os.kill(launch.process.pid, signal.SIGINT)
        assert launch.finish(60) == 130, launch.output
    assert "saved the checkpoint" not in launch.output
    (found, *_) = check_end(run_dir)
    assert "it cannot be resumed" in found.remedy and f"no checkpoint is in {save}" in found.remedy
