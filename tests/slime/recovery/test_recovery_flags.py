"""The flags of restarts: errors before the start, host memory in the plan, and the name of a session."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from config_cases import good_argv

from slime.checkpoints.hf_config import read_hf_config
from slime.config import Config
from slime.plan.host_phases import host_sum
from slime.plan.memory_estimate import estimate
from slime.rules import parse_args
from slime.tracking.run_record import recorded
from vime.backends import BACKENDS
from vime.run import disk_space
from vime.run.disk_space import require_disk_space
from vime.start.run_start import check_start

MEMORY = ("--recover-from", "memory")


class DiskUsage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            ("--use-kl-loss", "--ref-update-interval", "5"),
            "--recover-from must be disk with --ref-update-interval, got memory",
        ),
    ],
)
def test_memory_that_cannot_hold_the_checkpoint(flags: tuple[str, ...], text: str, tmp_path: Path) -> None:
    argv = [*good_argv(tmp_path), *flags]
    with pytest.raises(ValueError, match=text):
        parse_args([*argv, *MEMORY], BACKENDS)
    parse_args(argv, BACKENDS)


def test_the_plan_counts_the_checkpoints_in_memory(tmp_path: Path) -> None:
    """One complete state, and one that is being written."""
    c = parse_args([*good_argv(tmp_path), *MEMORY], BACKENDS)
    sizes = estimate(c, read_hf_config(c.rollout.hf_checkpoint))
    items = {item.name: item for item in host_sum([(c, sizes, ())]).items}
    assert c.megatron.params_dtype == "float32"  # such weights are their own main weights
    assert items["states in memory"].bytes == 2 * sizes.shape.params * (4 + 8)
    without = c.with_values(recover_from="disk")
    assert "states in memory" not in {item.name for item in host_sum([(without, sizes, ())]).items}


def test_a_run_that_resumes_has_the_name_of_the_run_before_it(tmp_path: Path) -> None:
    run_dir, save = tmp_path / "run", tmp_path / "save"
    iteration = save / "iter_0000001"
    iteration.mkdir(parents=True)
    (iteration / "metadata.json").write_text("{}")
    (save / "latest_checkpointed_iteration.txt").write_text("1")
    with recorded(run_dir, 3, "mine") as events:
        events.add("start", rollout=0)
    flags = {"load": str(save), "save": str(save), "run_dir": str(run_dir), "hf_checkpoint": str(tmp_path)}
    check_start(Config.from_flat(flags | {"rollout_session_id": "mine"}))
    for other in (None, "other"):
        with pytest.raises(
            ValueError, match="--rollout-session-id must be 'mine', .* got .*; give that name"
        ):
            check_start(Config.from_flat(flags | {"rollout_session_id": other}))
    check_start(Config.from_flat(flags | {"run_dir": str(tmp_path / "new"), "rollout_session_id": "other"}))


def test_too_little_shared_memory_is_an_error_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_args([*good_argv(tmp_path), *MEMORY], BACKENDS).with_values(weight_dir=str(tmp_path))
    require_disk_space(config)
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda path: DiskUsage(2**40, 2**40, 0))
    with pytest.raises(
        ValueError,
        match=r"--recover-from memory must have \S+ GiB of room in /dev/shm for 2 states of the trainer, got 0.00 GiB "
        r"free; enlarge /dev/shm .*, or set --recover-from disk",
    ):
        disk_space._require_shared_memory(2**20, tmp_path)
