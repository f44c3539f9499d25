"""SHA-256 of tensors, of files and of columns of train data. Equal values have equal digests in every process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from slime.data.columns import COLUMNS
from slime.data.rank_data import RankData

T = TypeVar("T")

LEFT_OUT = frozenset({"kept", "rollout_facts", "metadata"})
"""Columns that no loss reads. The run's records and its hooks read them."""
TRAINED = "trained_log_probs"
"""The column of the log-probs that the training pass computed."""


def digest(value: object) -> str:
    """Returns the SHA-256 of plain values, tensors and arrays in lists and dicts."""
    found = hashlib.sha256()
    _feed(found, value)
    return found.hexdigest()


def digest_tensors(tensors: Iterable[tuple[str, Tensor]], threads: int) -> dict[str, str]:
    """Maps each name to its tensor's digest, computed by `threads` threads."""
    named = dict(tensors)
    return _share(digest, {name: (value, value.nbytes) for name, value in named.items()}, threads)


def digest_files(folder: Path, names: Iterable[str], threads: int) -> dict[str, str]:
    """Maps the names of files in a folder to the SHA-256 of their bytes, computed by `threads` threads."""
    paths = {name: folder / name for name in names}
    return _share(_digest_file, {name: (path, path.stat().st_size) for name, path in paths.items()}, threads)


def _digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _share(work: Callable[[T], str], sized: Mapping[str, tuple[T, int]], threads: int) -> dict[str, str]:
    """Returns `work` of each value, in the order of the names. hashlib runs without Python's lock. The largest values
    start first, so that no thread ends long after the others."""
    order = sorted(sized, key=lambda name: -sized[name][1])
    with ThreadPoolExecutor(max(threads, 1), thread_name_prefix="receipt") as pool:
        found = dict(zip(order, pool.map(work, [sized[name][0] for name in order]), strict=True))
    return {name: found[name] for name in sized}


def digest_inputs(data: RankData) -> dict[str, object]:
    """Returns the digests of the data that a rank gets: per sample over all columns, per column over all samples, and
    of the schedule. Sample and column together name a difference."""
    columns = sorted(name for name in data if name in COLUMNS and COLUMNS[name].stage == "sent")
    columns = [name for name in columns if name not in LEFT_OUT]
    entries = {name: [digest(entry) for entry in data[name]] for name in columns}
    rows = [digest([entries[name][i] for name in columns]) for i in range(data.samples)]
    schedule = {name: value for name, value in data.items() if name not in COLUMNS}
    return {
        "samples": rows,
        "columns": {name: digest(values) for name, values in entries.items()},
        "schedule": digest(schedule),
    }


def digest_results(data: Mapping[str, object]) -> dict[str, list[str]]:
    """Returns the digests per sample of the columns that passes, the estimator and training have filled."""
    names = [name for name, column in COLUMNS.items() if column.stage in ("scored", "advantages")]
    found: dict[str, list[str]] = {}
    for name in (*names, TRAINED):
        values = data.get(name)
        if isinstance(values, list):
            found[name] = [digest(entry) for entry in values]
    return found


def _feed(found: hashlib._Hash, value: object) -> None:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, Tensor):
        found.update(f"{value.dtype} {tuple(value.shape)}:".encode())
        host = value.detach().cpu().contiguous()
        found.update(memoryview(host.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    elif isinstance(value, Mapping):
        found.update(f"dict {len(value)}:".encode())
        for name in sorted(value, key=repr):
            _feed(found, name)
            _feed(found, value[name])
    elif isinstance(value, list | tuple):
        found.update(f"list {len(value)}:".encode())
        for entry in value:
            _feed(found, entry)
    else:
        plain = value.item() if isinstance(value, np.generic) else value
        found.update(f"{plain!r};".encode())
