"""Starts the ranks of a replay with the run's flags. Only the ranks load Megatron (`vime.replay.rank`)."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path

import torch
from torch import Tensor

from slime.checkpoints.checkpoint_dir import LATEST, existing, iteration_path
from slime.checkpoints.checkpoint_files import CHECKSUMS
from slime.cluster.rendezvous import LOOPBACK_ONLY
from slime.config import Config
from slime.receipts.chain import Record, read_chain
from slime.receipts.flags import FOLDER
from slime.weight_sync.registry import default_channel
from vime.replay.job import COLUMNS, FAILURE, VALUES, ReplayJob
from vime.replay.mending import mended
from vime.replay.source import RecordedRun, StartState
from vime.testing.ranks import run_ranks


def replay(
    run: RecordedRun, start: StartState, last: int, folder: Path, keep: tuple[str, ...] = ()
) -> list[list[Record]]:
    """Computes the rollouts from `start` to `last` (none if `last` comes before) in `folder`. Returns the receipt of
    each rank. Raises ValueError if a rank fails."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = make_config(run, start, folder)
    config.save_json(folder / "config.json")
    samples = {
        i: mended(run.samples[i], i, folder / "samples" / f"{i}.pt") for i in range(start.first, last + 1)
    }
    threads = run.receipts[0][0]["threads"]
    os.environ.update(LOOPBACK_ONLY)
    try:
        run_ranks(enter_rank, run.ranks, (ReplayJob(config, samples, folder, threads, keep),))
    except RuntimeError as error:
        failure = folder / FAILURE
        cause = failure.read_text(encoding="utf-8") if failure.is_file() else "a rank that was killed"
        raise ValueError(
            f"RUN must be a run whose trainer runs here, got {cause}; use the machine, the packages and "
            "the environment of the run"
        ) from error
    return [read_chain(folder, f"{FOLDER}/trainer-{rank}.jsonl") for rank in range(run.ranks)]


def make_config(run: RecordedRun, start: StartState, folder: Path) -> Config:
    """Returns the run's flags for a trainer without engines, which starts from `start` and writes only to `folder`."""
    checkpoint = run.config.checkpoint
    values: dict[str, object] = {
        **{"run_dir": str(folder), "receipt": True, "receipt_key": None, "save": None, "save_hf": None},
        **{"critic_save": None, "save_debug_rollout_data": None, "load_debug_rollout_data": None},
        **{"save_debug_train_data": f"{folder}/{COLUMNS}", "save_samples": 0, "profile_steps": None},
        **{"record_memory_history": False, "debug_train_only": True, "rollout_num_gpus": 0},
        **{"weight_dir": str(folder / "weights"), "update_weight_transport": default_channel(None)},
        **{"update_weight_mode": "full", "memory_dir": None, "rlk_consistency": "off"},
    }
    if start.iteration is not None:
        assert start.folder is not None
        link_checkpoint(Path(start.folder), start.iteration, folder / "start")
        values |= {"load": str(folder / "start"), "ckpt_step": start.iteration, "start_rollout_id": None}
        if start.folder == checkpoint.save:
            values |= {"finetune": False, "no_load_optim": False, "no_load_rng": False, "critic_load": None}
    elif checkpoint.load and checkpoint.load == checkpoint.save and not checkpoint.finetune:
        values |= {"load": None}
    return run.config.with_values(**values)


def link_checkpoint(directory: Path, iteration: int, to: Path) -> None:
    """Links the files of a checkpoint, and of the critic's, without their checksums. The digests of the receipt are
    stronger, and name the damaged tensor instead of the file."""
    for folder, into in ((directory, to), (directory / "critic", to / "critic")):
        source = existing(folder, iteration)
        if not source.is_dir():
            continue
        target = iteration_path(into, iteration)
        for path in (path for path in source.rglob("*") if path.is_file() and path.name != CHECKSUMS):
            link = target / path.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.resolve())
        (into / LATEST).write_text(str(iteration), encoding="utf-8")


def enter_rank(rank: int, job: ReplayJob) -> None:
    """Runs a rank, whose output goes to a file: the warnings of Megatron are not those of this command."""
    log = os.open(job.folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    from vime.replay.rank import replay_rank

    try:
        replay_rank(rank, job)
    except Exception as error:  # border of the process: the command shows the first error
        with contextlib.suppress(FileExistsError), open(job.folder / FAILURE, "x", encoding="utf-8") as file:
            file.write(f"{type(error).__name__}: {error}")
        raise


def read_values(folder: Path, rank: int) -> dict[str, Tensor]:
    """Returns the values that a replay has kept."""
    file = folder / VALUES.format(rank=rank)
    found: dict[str, Tensor] = torch.load(file, weights_only=True)  # ok: tensors only
    return found
