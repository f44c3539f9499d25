"""Rules of --rollout-data-transport straw: the queue by which several rollout hosts generate for one trainer."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from slime.config.fields import spelled
from slime.config.schema import Config
from slime.config.sections.rollout import RolloutConfig
from slime.records.errors import FlagError
from slime.system.imports import is_installed

STRAW = "straw"
PACKAGE = "straw-queue"
ROLLOUTS = (
    "slime.rollout.vllm_rollout.generate_rollout",
    "slime.rollout.sglang_rollout.generate_rollout",
    "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
)
"""Rollout functions whose groups come from the stream of groups, and so from the queue."""
_FLAGS = (
    *("rollout_data_dir", "rollout_queue_run_id", "rollout_queue_lease_seconds", "rollout_queue_segment_mib"),
    *("rollout_queue_online_gc", "rollout_io_concurrency", "rollout_storage_profile"),
    "rollout_storage_declaration",
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def fill_queue(c: argparse.Namespace) -> None:
    """Fills in the folder and name of the queue, and the folder of the weights that its hosts read."""
    if c.rollout_data_transport != STRAW:
        return
    if c.rollout_data_dir is None and c.save is not None:
        c.rollout_data_dir = str(Path(c.save) / "rollout_data")
    c.rollout_queue_run_id = c.rollout_queue_run_id or Path(c.run_dir).name
    if c.rollout_data_dir is not None and c.weight_dir is None:
        c.weight_dir = str(Path(c.rollout_data_dir).resolve() / c.rollout_queue_run_id / "weights")


def queue_notes(c: Config) -> Iterator[str]:
    """Yields a note for each flag of the queue in a run without one."""
    if c.rollout.rollout_data_transport == STRAW:
        return
    if c.rollout.rollout_data_transport == "nixl":
        yield "--rollout-data-transport nixl is taken as object-store, which gives the same result"
    for name in _FLAGS:
        if getattr(c.rollout, name) != getattr(RolloutConfig(), name):
            yield f"{spelled(name)} has no effect without --rollout-data-transport straw: it is read only there"


def check_queue(c: Config) -> None:
    """Checks that hosts can reach the queue and the weights."""
    flags = c.rollout
    if flags.rollout_data_transport != STRAW:
        return
    flag = "--rollout-data-transport straw"
    if not is_installed(STRAW):
        raise FlagError(
            flag,
            f"have the package {PACKAGE}",
            "none installed",
            f"pip install {PACKAGE}, or leave the flag out",
        )
    if flags.rollout_data_dir is None:
        raise FlagError(
            "--rollout-data-dir", f"be given with {flag}", "none", "name a folder, or give --save"
        )
    if not _NAME.fullmatch(name := flags.rollout_queue_run_id or ""):
        raise FlagError(
            "--rollout-queue-run-id",
            "be a name of letters, digits, '.', '_' and '-'",
            name,
            "give such a name",
        )
    if not c.num_engines:
        raise FlagError(flag, "have engines", "none", "leave the flag out: only generated groups are queued")
    if flags.rollout_function_path not in ROLLOUTS:
        raise FlagError(
            flag,
            "have the usual --rollout-function-path",
            flags.rollout_function_path,
            "a function that makes its own groups does not use the queue: leave one of the two out",
        )
    _check_weights(c, flag)
    _check_declaration(flags)


def _check_weights(c: Config, flag: str) -> None:
    """Raises ValueError unless rollout hosts can read every version of the weights from files."""
    update = c.weight_update
    if c.debug.debug_rollout_only:
        return
    if update.update_weight_transport != "disk":
        raise FlagError(
            "--update-weight-transport",
            f"be disk with {flag}",
            update.update_weight_transport,
            "rollout hosts read the weights as files: leave the flag out",
        )
    if update.update_weight_mode != "full":
        raise FlagError(
            "--update-weight-mode",
            f"be full with {flag}",
            update.update_weight_mode,
            "a rollout host that starts late has no base for a delta: leave the flag out",
        )


def _check_declaration(flags: RolloutConfig) -> None:
    import json

    declared = flags.rollout_storage_declaration
    if (flags.rollout_storage_profile == "local") != (declared is None):
        raise FlagError(
            "--rollout-storage-declaration",
            "be given with --rollout-storage-profile juicefs, and only there",
            f"{declared} with {flags.rollout_storage_profile}",
            "give both, or none",
        )
    if declared is None:
        return
    try:
        found = json.loads(Path(declared).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FlagError(
            "--rollout-storage-declaration", "name a JSON file", f"{declared} ({error})", "correct the file"
        ) from error
    from straw.backend import FilesystemBackend

    try:
        FilesystemBackend(".", profile=flags.rollout_storage_profile, declaration=found)
    except ValueError as error:
        raise FlagError(
            "--rollout-storage-declaration",
            "declare a mount that straw supports",
            f"{declared} ({error})",
            "mount the file system as declared, or use --rollout-storage-profile local",
        ) from error
