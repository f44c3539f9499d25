"""Flags of the debug section: run only trainer or engines, save and replay samples between them, trace steps."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slime.config.fields import flag
from slime.config.ranges import COUNT, FRACTION
from slime.records.errors import FlagError


@dataclass(frozen=True)
class DebugConfig:
    """Paths are templates: {rollout_id} is replaced, and {rank} in files that each rank writes."""

    debug_rollout_only: bool = flag(False, "run only the engines, without a trainer")
    debug_train_only: bool = flag(False, "run only the trainer, without engines")
    save_debug_rollout_data: str | None = flag(
        None, "file for the samples of each rollout; {rollout_id} in its name is replaced"
    )
    save_debug_train_data: str | None = flag(
        None,
        "file for a trainer rank's columns of each rollout, advantages and log-probs included; {rollout_id} and {rank} "
        "in its name are replaced",
    )
    load_debug_rollout_data: str | None = flag(None, "train on saved samples; implies --debug-train-only")
    load_debug_rollout_data_subsample: float | None = flag(
        None, "use only this fraction of the loaded samples", range=FRACTION
    )
    dump_details: str | None = flag(
        None, "directory for the samples of each rollout, and for each rank's train data"
    )
    receipt: bool = flag(
        False,
        "write hashes of each step's samples, code, flags, weights and results to receipt/ in the run directory, and "
        "save what vime replay needs to compute the step again",
    )
    receipt_key: str | None = flag(
        None, "PEM file of the Ed25519 private key that signs the receipt", secret=True
    )
    profile_steps: str | None = flag(
        None, "A:B traces the training of rollouts A to B-1 (PyTorch profiler, one file per rank and rollout)"
    )
    record_memory_history: bool = flag(
        False,
        "record each allocation of the trainer's GPUs, and write a snapshot of each rank; when it is out of "
        "memory, too",
    )
    memory_snapshot_num_steps: int | None = flag(
        None, "rollouts that are trained before the snapshot (default: all of the run)", range=COUNT
    )
    memory_snapshot_dir: str | None = flag(
        None, "directory of the snapshots (default: profile/ in the run directory)"
    )


def profiled_steps(text: str | None, flag: str = "--profile-steps") -> range:
    """Returns the rollouts of --profile-steps: "2:4" -> 2, 3. The range is empty without the flag."""
    if text is None:
        return range(0)
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise FlagError(flag, "be A:B with whole numbers 0 <= A < B", text, "2:4 traces rollouts 2 and 3")
    return range(int(match[1]), int(match[2]))
