"""Tests the flags of --rollout-data-transport straw: defaults, notes, and errors in one line."""

from __future__ import annotations

import json

import pytest
from config_cases import good_argv

from slime.rules import parse_args
from vime.backends import BACKENDS

pytest.importorskip("straw")
STRAW = ("--rollout-data-transport", "straw")
MOUNT = {
    **{"direct_mount": True, "writeback": False, "open_cache": 0, "readdir_cache": False},
    **{"client_version": "1.3", "durability_description": "metadata in Redis with AOF"},
}


def test_the_queue_has_the_name_of_the_run_and_lies_with_its_checkpoints(tmp_path):
    argv = [
        *good_argv(tmp_path),
        *STRAW,
        "--save",
        str(tmp_path / "save"),
        "--run-dir",
        str(tmp_path / "mine"),
    ]
    config = parse_args(argv, BACKENDS)
    assert config.rollout.rollout_data_dir == str(tmp_path / "save" / "rollout_data")
    assert config.rollout.rollout_queue_run_id == "mine"
    assert config.weight_update.weight_dir == str(tmp_path / "save" / "rollout_data" / "mine" / "weights")
    assert config.weight_update.update_weight_transport == "disk"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("", "--rollout-data-dir must be given with --rollout-data-transport straw, got none"),
        (
            "--rollout-data-dir /q --rollout-queue-run-id a/b",
            "--rollout-queue-run-id must be a name of letters",
        ),
        (
            "--rollout-data-dir /q --update-weight-transport nccl",
            "--update-weight-transport must be disk with",
        ),
        (
            "--rollout-data-dir /q --update-weight-mode delta",
            "--update-weight-mode must be full with --rollout-data-transport",
        ),
        (
            "--rollout-data-dir /q --rollout-storage-profile juicefs",
            "--rollout-storage-declaration must be given with --rollout-storage-profile juicefs",
        ),
        (
            "--rollout-data-dir /q --rollout-function-path test_straw_flags.own_rollout",
            "--rollout-data-transport straw must have the usual --rollout-function-path",
        ),
        (
            "--rollout-data-dir /q --rollout-queue-lease-seconds 0",
            "--rollout-queue-lease-seconds must be above 0",
        ),
    ],
)
def test_a_wrong_flag_is_an_error_in_one_line(tmp_path, flags, text):
    with pytest.raises(ValueError) as error:
        parse_args([*good_argv(tmp_path), *STRAW, *flags.split()], BACKENDS)
    (line,) = [line for line in str(error.value).splitlines() if text in line]
    assert ", got " in line


def own_rollout(args: object, rollout_id: int, data_source: object, evaluation: bool = False) -> None:
    """A rollout function that makes its own groups."""


@pytest.mark.parametrize("change", [{}, {"writeback": True}], ids=["as straw needs it", "with writeback"])
def test_the_declaration_of_juicefs_is_checked(tmp_path, change):
    file = tmp_path / "mount.json"
    file.write_text(json.dumps(MOUNT | change))
    argv = [*good_argv(tmp_path), *STRAW, "--rollout-data-dir", str(tmp_path / "q")]
    argv += ["--rollout-storage-profile", "juicefs", "--rollout-storage-declaration", str(file)]
    if not change:
        assert parse_args(argv, BACKENDS).rollout.rollout_storage_declaration == str(file)
        return
    with pytest.raises(
        ValueError, match="--rollout-storage-declaration must declare a mount .* writeback=False"
    ):
        parse_args(argv, BACKENDS)
