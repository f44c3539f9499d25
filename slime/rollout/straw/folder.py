"""The folder of one queue: its files, and the checks that it is the queue of this run.

DATA_DIR/RUN_ID/
  queue.json        the run that owns the queue, and the settings with which it was made
  state.json        what every host reads: the number of the owner's start, and whether the run has ended
  weights.json      the newest weights and where engines find them
  store/            groups and leases, written by the package straw
  weights/          files of weights, unless --weight-dir is given
  hosts/NAME/       run directory of a rollout host, with its mailbox: call.json, reply.json
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from slime.config.schema import Config
from slime.records.errors import FlagError
from slime.types import Metadata

Plain: TypeAlias = Metadata
"""Plain data, as JSON has them."""
DIR, RUN_ID = "--rollout-data-dir", "--rollout-queue-run-id"
MADE_WITH = {
    "lease_s": "--rollout-queue-lease-seconds",
    "online_gc": "--rollout-queue-online-gc",
    "profile": "--rollout-storage-profile",
}
"""Settings that a queue keeps from its first start to its last."""


@dataclass(frozen=True)
class QueueFolder:
    """The files of one queue. Each file has one writer, which replaces it in one step."""

    path: Path

    @property
    def queue(self) -> Path:
        return self.path / "queue.json"

    @property
    def state(self) -> Path:
        return self.path / "state.json"

    @property
    def weights(self) -> Path:
        return self.path / "weights.json"

    @property
    def store(self) -> Path:
        return self.path / "store"

    @property
    def hosts(self) -> Path:
        return self.path / "hosts"


def folder_for(config: Config) -> QueueFolder:
    """Returns the folder of the run's queue."""
    flags = config.rollout
    assert flags.rollout_data_dir is not None and flags.rollout_queue_run_id is not None
    return QueueFolder(Path(flags.rollout_data_dir).resolve() / flags.rollout_queue_run_id)


def queue_settings(config: Config) -> Plain:
    """Returns the settings that must not change during the life of a queue."""
    flags = config.rollout
    return {
        "lease_s": flags.rollout_queue_lease_seconds,
        "online_gc": flags.rollout_queue_online_gc,
        "profile": flags.rollout_storage_profile,
    }


def make_private(path: Path) -> None:
    """Makes a folder that only this user can write to. Raises ValueError for a folder of another user, because hosts
    trust the content."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise FlagError(
            DIR,
            "have a queue that nobody but this user can write to",
            f"{path} (owner {found.st_uid}, mode {stat.filemode(found.st_mode)})",
            "remove that folder, or name another one",
        )


def write_plain(path: Path, fields: Mapping[str, object]) -> None:
    """Replaces a file in one step, so that no reader sees an incomplete file."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(fields), encoding="utf-8")
    os.replace(scratch, path)


def read_plain(path: Path) -> Plain | None:
    """Returns the content of a file of the queue. Returns None without a complete file: a network disk may show a
    part."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def require_settings(found: Plain, config: Config) -> None:
    """Raises ValueError for a queue that was made with other settings."""
    for name, value in queue_settings(config).items():
        if found.get(name) != value:
            raise FlagError(
                MADE_WITH[name],
                f"be {found.get(name)}, with which the queue was made",
                value,
                f"give that value, or another {RUN_ID}",
            )


def require_own(found: Plain, run: str | None, run_dir: str, start: int, overwrite: bool) -> None:
    """Raises ValueError unless the queue is of the run that starts at rollout `start`. `run` is the id in its
    checkpoint. A run whose checkpoint has no id, or that has no checkpoint, is known by its run directory."""
    if start > 0 and run is not None:
        own = found["run"] == run
    else:
        own = found["run_dir"] == run_dir and not (overwrite and start == 0)
    if not own:
        raise FlagError(
            RUN_ID,
            "name a new queue, or the queue of the run that resumes",
            f"a queue of run {found['run']} in {found['run_dir']}",
            "name another queue, or remove its folder",
        )


def require_same_sampling(found: Plain, sampling: Mapping[str, object]) -> None:
    """Raises ValueError if a host would sample in another way than the run of the queue."""
    for flag, value in sampling.items():
        if (other := found["sampling"].get(flag)) != value:
            raise FlagError(
                flag,
                f"be {other}, as in the run of the queue",
                value,
                "start the rollout host with the flags of the run",
            )
