"""A run reports where it starts, and replaces results of an earlier run only with a flag that allows it."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_cases import good_argv

from slime.checkpoints.checkpoint_dir import first_rollout
from slime.config import Config
from slime.rules import parse_args
from vime.start.run_start import check_start, finished, resume_flags, start_line


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    return [*good_argv(tmp_path), "--run-dir", str(tmp_path / "run")]


def folder(path: Path, *iterations: int, record: str | None = None) -> str:
    """Makes a folder with complete checkpoints, judged by their file names."""
    for iteration in iterations:
        (path / f"iter_{iteration:07d}").mkdir(parents=True)
        (path / f"iter_{iteration:07d}" / "metadata.json").touch()
    path.mkdir(exist_ok=True)
    if record is not None:
        (path / "latest_checkpointed_iteration.txt").write_text(record)
    return str(path)


def config(argv: list[str], *more: str) -> Config:
    return parse_args([*argv, *more], rules=(check_start,))


def refused(argv: list[str], *more: str) -> str:
    with pytest.raises(ValueError) as error:
        config(argv, *more)
    return str(error.value)


def test_a_new_run(argv, tmp_path):
    new = config(argv, "--save", str(tmp_path / "out"))
    assert start_line(new) == f"new run with weights from {new.rollout.hf_checkpoint}"
    assert not finished(new)


def test_what_a_second_command_adds_to_resume(argv, tmp_path):
    """For each set of flags, the flags together with the added flags resume after the newest checkpoint."""
    out = folder(tmp_path / "out")
    save, load = ["--save", out], ["--load", out]
    for flags in ([], save, [*save, *load]):
        assert resume_flags(config(argv, *flags)) is None, "no checkpoint is there"
    first = {"plain": config(argv, *save), "both": config(argv, *save, *load)}
    folder(tmp_path / "out", 3, 7, record="7")
    assert resume_flags(first["plain"]) == load and resume_flags(first["both"]) == []
    again = config(argv, *save, *load, "--ckpt-step", "3")
    added = resume_flags(again)
    assert added == ["--ckpt-step", "7"]
    ended = start_line(config(argv, *save, *load, "--ckpt-step", "3", *added))
    assert ended.startswith(f"resumes after rollout 7 of {out}")
    assert start_line(config(argv, *save, *load)) == f"resumes after rollout 7 of {out}"


def test_a_run_that_resumes(argv, tmp_path):
    out = folder(tmp_path / "out", 3, 7, record="7")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    resumed = config(argv, "--load", out, "--save", out, "--num-rollout", "9")
    assert start_line(resumed) == f"resumes after rollout 7 of {out}"
    assert not finished(resumed)
    assert finished(config(argv, "--load", out, "--save", out, "--num-rollout", "8"))
    earlier = config(argv, "--load", out, "--save", out, "--ckpt-step", "3")
    again = "a second start of this command would do the same rollouts again"
    assert start_line(earlier) == f"resumes after rollout 3 of {out}, as set by --ckpt-step: {again}"


def test_a_command_that_is_queued_again_does_not_repeat_its_rollouts(argv, tmp_path):
    """--start-rollout-id 0 applies to the command's first start only."""
    out = folder(tmp_path / "out", 3, 7, record="7")
    queued = ("--load", out, "--save", out, "--num-rollout", "8", "--start-rollout-id")
    for first in ("0", "7"):
        resumed = config(argv, *queued, first)
        assert first_rollout(resumed, 7) == 8 and finished(resumed)
        assert start_line(resumed).startswith(
            f"resumes after rollout 7 of {out}; --start-rollout-id {first} was for"
        )
    later = config(argv, *queued, "9")  # this is more than the saved number, so it can only be a first start
    assert first_rollout(later, 7) == 9
    other = config(argv, "--load", out, "--save", str(tmp_path / "new"), "--start-rollout-id", "0")
    assert first_rollout(other, 7) == 0 and not finished(other)
    assert start_line(other).endswith(
        "from --start-rollout-id 0: a second start of this command would do the same rollouts again"
    )


def test_a_mistyped_load_does_not_replace_checkpoints(argv, tmp_path):
    out = folder(tmp_path / "out", 1, 2, 3, 4, 5, record="5")
    typed = ("--load", str(tmp_path / "uot"), "--save", out)
    assert refused(argv, *typed) == (
        f"--load must name a folder that exists, or that of --save, got {tmp_path / 'uot'}, which is no directory; "
        "check the path"
    )
    assert refused(argv, "--save", out) == (
        f"--save must be a folder without checkpoints for a run that does not resume them, got {out} with iterations "
        f"..., 2, 3, 4, 5; resume with --load {out}, name another folder, or give --overwrite"
    )
    assert not finished(config(argv, "--save", out, "--overwrite"))


def test_another_runs_checkpoints_are_not_replaced_by_one_that_resumes(argv, tmp_path):
    load, save = folder(tmp_path / "a", 5, record="5"), folder(tmp_path / "b", 2, record="2")
    assert f"got {save} with iteration 2; resume" in refused(argv, "--load", load, "--save", save)


def test_metrics_of_another_run_are_not_replaced(argv, tmp_path):
    (tmp_path / "run").mkdir()
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.touch()
    config(argv)
    metrics.write_text("{}\n")
    assert refused(argv) == (
        f"--run-dir must be a folder without metrics for a new run, got {metrics}; resume with --load (and "
        "--ckpt-step), name another folder, or give --overwrite"
    )
    config(argv, "--overwrite")
    out = str(tmp_path / "out")  # a queued command that was killed before its first checkpoint
    queued = config(argv, "--load", out, "--save", out)
    assert start_line(queued).endswith(f"; --load {out} has no checkpoint yet")


def test_checkpoints_without_their_record_are_not_passed_over(argv, tmp_path):
    out = folder(tmp_path / "out", 4, 9)
    assert refused(argv, "--load", out, "--save", out, "--overwrite") == (
        "--load must have a latest_checkpointed_iteration.txt with the number of the newest checkpoint, got "
        f"{out} with iterations 4, 9 and none; take one with --ckpt-step 9"
    )
    chosen = config(argv, "--load", out, "--save", out, "--ckpt-step", "9")
    assert start_line(chosen).startswith(f"resumes after rollout 9 of {out}, as set by --ckpt-step")
