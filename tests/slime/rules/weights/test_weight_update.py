"""Tests flags that --update-weight-mode delta allows, and the older names of its flags."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_cases import good_argv

from vime.backends import parse_config

DELTA = ["--update-weight-mode", "delta"]


def written(args: object, version_dir: str, rollout_engines: list[str]) -> None:
    """The hook of the tests in this file."""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([*DELTA, "--colocate"], "--update-weight-mode must be full with --colocate, got delta"),
        (
            [*DELTA, "--rollout-num-gpus", "1", "--lora-rank", "8"],
            "--update-weight-mode must be full where adapters are sent, got delta with --lora-rank 8",
        ),
        (
            ["--update-weight-local-checkpoint-dir", "/tmp/copy"],
            "--update-weight-mode must be delta with --update-weight-local-checkpoint-dir, got full with /tmp/copy",
        ),
        ([*DELTA, "--update-weight-delta-encoding", "sparse"], "must be one of xor, overwrite, got sparse"),
        (
            [*DELTA, "--update-weight-delta-checksum", "crc"],
            "must be one of xxh3-128, blake3, adler32, sha256, got crc",
        ),
        (
            ["--custom-update-weight-post-write-path", "no_module.hook"],
            "--custom-update-weight-post-write-path must name a module that can be imported",
        ),
        (
            ["--custom-delta-pre-push-path", "no_module.hook"],
            "--custom-delta-pre-push-path must name a module that can be imported",
        ),
        (
            [
                *DELTA,
                "--rollout-num-gpus",
                "1",
                "--rollout-backend",
                "sglang",
                "--update-weight-transport",
                "disk",
            ],
            "--update-weight-mode must be full with --rollout-backend sglang, got delta",
        ),
    ],
)
def test_bad_flags(tmp_path: Path, flags: list[str], message: str) -> None:
    argv = [token for token in good_argv(tmp_path) if token != "--colocate"]
    if "--rollout-num-gpus" not in flags and "--colocate" not in flags:
        flags = [*flags, "--rollout-num-gpus", "1"]
    with pytest.raises(ValueError, match=message):
        parse_config([*argv, *flags])


def test_a_checksum_whose_package_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "blake3", None)  # as if it were not installed
    argv = [token for token in good_argv(tmp_path) if token != "--colocate"]
    argv += [*DELTA, "--rollout-num-gpus", "1", "--update-weight-delta-checksum", "blake3"]
    with pytest.raises(
        ValueError, match="got blake3, which is not installed on this host; pip install blake3"
    ):
        parse_config(argv)


def test_older_names(tmp_path: Path) -> None:
    argv = [token for token in good_argv(tmp_path) if token != "--colocate"]
    argv += [*DELTA, "--rollout-num-gpus", "1", "--update-weight-delta-dir", str(tmp_path)]
    found = parse_config([*argv, "--custom-delta-pre-push-path", f"{__name__}.written"]).weight_update
    assert found.weight_dir == str(tmp_path)
    assert found.custom_update_weight_post_write_path == f"{__name__}.written"
    assert (found.update_weight_delta_encoding, found.update_weight_delta_checksum) == ("xor", "xxh3-128")
