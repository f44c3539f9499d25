"""`vime replay --verify RUN`: checks receipts and the files of a run without a GPU and without its trainer."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory

from slime.checkpoints.checkpoint_dir import existing
from slime.checkpoints.hf_config import read_hf_config
from slime.config.hook_calls import Hooks
from slime.data.train_data import make_rank_data
from slime.receipts.chain import Record
from slime.receipts.digests import digest_files, digest_inputs
from slime.receipts.origin import digest_flags
from slime.rollout.debug_data import load_debug_rollout_data
from vime.replay.compare import StepColumns, check_columns, compare_inputs
from vime.replay.mending import is_damaged, mended
from vime.replay.source import RecordedRun, last_trained, read_run


@dataclass(frozen=True)
class Verified:
    """What a check of a run has read, and the problems that it found."""

    run: RecordedRun
    signer: str
    files: int
    problems: list[str]


def verify(run_dir: Path, public: str | None) -> Verified:
    """Checks the chains, the signatures, flags, samples, columns and checkpoints. Raises ValueError for a broken
    chain."""
    run = read_run(run_dir, public)
    problems = [*_check_origin(run), *_check_steps(run)]
    files = 0
    for rollout in run.steps:
        problems += check_samples(run, rollout)
        for rank in range(run.ranks):
            if (record := run.step(rank, rollout)) is not None:
                problem = check_columns(record, columns_path(run, rollout, rank))
                problems += [] if problem is None else [problem]
        files += 1 + run.ranks
    saved = {one["rollout"]: len(one["files"]) for one in run.receipts[0] if one["kind"] == "checkpoint"}
    for iteration in saved:
        problems += check_checkpoint(run, iteration)
    files += sum(saved.values())
    return Verified(run, run.receipts[0][-1]["public_key"], files, problems)


def columns_path(run: RecordedRun, rollout: int, rank: int) -> Path:
    """Returns the file of a rank's saved columns."""
    template = run.config.debug.save_debug_train_data
    assert template is not None, "--receipt sets it"
    return Path(template.format(rollout_id=rollout, rank=rank))


def _check_origin(run: RecordedRun) -> Iterator[str]:
    for rank, chain in enumerate(run.receipts):
        last = next(one for one in reversed(chain) if one["kind"] == "begin")
        if last["flags"] != (found := digest_flags(run.directory)):
            yield (
                f"config.json must have the digest {last['flags'][:16]} of the receipt of rank {rank}, got "
                f"{found[:16]}; the receipt is of another run, or the flags were changed"
            )


def _check_steps(run: RecordedRun) -> Iterator[str]:
    """Yields the steps that a receipt lacks: between two others, or after the last. The journal and the saved columns
    have the last trained step."""
    steps = run.steps
    if not steps:
        yield "the receipt must have a trained step, got none; the run ended before its first step"
        return
    written = [i for i in run.samples if columns_path(run, i, 0).is_file()]
    last = last_trained(run.directory)
    expected = range(steps[0], max([*steps, *written, *([] if last is None else [last])]) + 1)
    for rank in range(run.ranks):
        missing = [i for i in expected if run.step(rank, i) is None]
        if missing:
            yield (
                f"the receipt of rank {rank} must have steps {steps[0]} to {expected[-1]}, got none of {missing}; "
                "restore the file"
            )


def check_samples(run: RecordedRun, rollout: int) -> list[str]:
    """Converts the saved samples of a step and compares them with what the trainer got."""
    if rollout not in run.samples:
        return [
            f"step {rollout} must have its saved samples, got none; restore {run.config.debug.save_debug_rollout_data}"
        ]
    config = run.config
    hf_config = read_hf_config(config.rollout.hf_checkpoint)
    with TemporaryDirectory() as scratch:
        template = mended(run.samples[rollout], rollout, Path(scratch) / "samples.pt")
        groups = load_debug_rollout_data(template, rollout)
    samples = [sample for group in groups for sample in group]
    try:
        data = make_rank_data(config, Hooks(config), samples, config.data_parallel_size, hf_config)
    except ValueError as error:
        return [
            f"step {rollout}: the saved samples must be those that were trained, got {error}; restore their file"
        ]
    found = []
    for rank in range(run.ranks):
        record = run.step(rank, rollout)
        if record is None:
            continue
        made: Record = {"inputs": digest_inputs(part := data[dp_rank(run, rank)])}
        columns = StepColumns(columns_path(run, rollout, rank), part)
        difference = compare_inputs(rank, record, made, columns)
        found += [] if difference is None else [str(difference)]
    return found


def dp_rank(run: RecordedRun, rank: int) -> int:
    """Returns the data-parallel rank: rank = ((pp * dp_size + dp) * cp_size + cp) * tp_size + tp."""
    sizes = run.config.megatron
    inner = sizes.tensor_model_parallel_size * sizes.context_parallel_size
    return rank // inner % run.config.data_parallel_size


def check_checkpoint(run: RecordedRun, iteration: int) -> list[str]:
    """Returns a line per file of a checkpoint that is still there and differs from the receipt, with its damaged
    tensors."""
    records = [one for one in run.receipts[0] if one["kind"] == "checkpoint" and one["rollout"] == iteration]
    save = run.config.checkpoint.save
    folder = None if save is None else existing(Path(save), iteration)
    if not records or folder is None or not folder.is_dir():
        return []
    expected: dict[str, str] = records[-1]["files"]  # a restarted run may have written the iteration twice
    present = [name for name in expected if (folder / name).is_file()]
    digests = digest_files(folder, present, len(os.sched_getaffinity(0)))
    found = []
    for name, wanted in expected.items():
        path = folder / name
        if name not in digests:
            found.append(f"{path} must be there as the run saved it, got no such file; restore it")
        elif digests[name] != wanted:
            tensors = _find_tensors(folder, path)
            where = f" in tensor {', '.join(tensors)}" if tensors else ""
            found.append(
                f"{path} must have the digest of the receipt, got other bytes{where}; restore the file"
            )
    return found


def _find_tensors(folder: Path, path: Path) -> list[str]:
    """Returns the names of the tensors in a checkpoint's file whose bytes do not have their checksums."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Megatron, about packages that are not installed
        from slime.megatron_backend.checkpoint.safe_reading import MetadataReader

    try:
        stored = MetadataReader(folder).read_metadata().storage_data
    except (OSError, ValueError, EOFError, UnpicklingError):
        return []
    content = path.read_bytes()
    parts = {
        index.fqn: content[place.offset : place.offset + place.length]
        for index, place in stored.items()
        if place.relative_path == path.name
    }
    return [name for name, part in parts.items() if is_damaged(BytesIO(part))]
