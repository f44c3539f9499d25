"""Compares a recorded step with the recomputed one: the first difference, with its side, index and values."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slime.receipts.chain import Record
from slime.receipts.digests import digest
from vime.replay.mending import is_damaged, write_mended

PARTS = ("samples", "log-probs", "advantages", "loss", "weights", "optimizer")
"""The parts of a step in the order in which a difference would spread."""
RECOMPUTED = "the recomputed side differs from the receipt"
_ORDER = (
    "log_probs",
    "old_log_probs",
    "trained_log_probs",
    "ref_log_probs",
    "values",
    "advantages",
    "returns",
)


@dataclass(frozen=True)
class StepDifference:
    """The first difference of a rank's step. `part`: one of PARTS, `what`: the tensor or the sample. `side`: which
    of the two differs from the receipt or cannot be decided. `names`: all tensors of the state that differ."""

    rollout: int
    rank: int
    part: str
    what: str
    side: str
    values: str = ""
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        rank = f", rank {self.rank}" if self.rank else ""
        values = f" {self.values}" if self.values else ""
        return f"step {self.rollout}{rank}: {self.part} differ: {self.what}{values}; {self.side}"


@dataclass(frozen=True)
class StepColumns:
    """The saved columns of a rank, as the run and the replay wrote them."""

    recorded: Path
    recomputed: Path | Mapping[str, list[object]]

    def describe(self, column: str, row: int, recorded_digest: str | None) -> tuple[str, str]:
        """Returns the first differing element of a sample's column, and the side that is wrong."""
        made = _read_columns(self.recomputed) if isinstance(self.recomputed, Path) else self.recomputed
        ours = made[column][row]
        if not self.recorded.is_file():
            return "", "the run's columns are not at hand, so the values are unknown"
        theirs = _read_columns(self.recorded)[column][row]
        values = first_element(theirs, ours)
        if recorded_digest is not None and digest(theirs) != recorded_digest:
            return values, f"the recorded side is damaged: {self.recorded} differs from the receipt"
        return values, RECOMPUTED


def _read_columns(path: Path) -> dict[str, list[object]]:
    with tempfile.TemporaryDirectory() as scratch:
        source = path
        if is_damaged(path):
            write_mended(path, source := Path(scratch) / path.name)
        saved = torch.load(source, weights_only=True)  # ok: plain values
        found: dict[str, list[object]] = saved["rollout_data"]
        return found


def first_element(recorded: object, recomputed: object) -> str:
    """Returns the first element that differs in bits: "at [7]: recorded 17, recomputed 16"."""
    if isinstance(recorded, Tensor) and isinstance(recomputed, Tensor):
        if recorded.shape != recomputed.shape or recorded.dtype != recomputed.dtype:
            return f"has shape {tuple(recorded.shape)} recorded, {tuple(recomputed.shape)} recomputed"
        size = recorded.element_size()
        pair = [
            one.contiguous().reshape(-1).view(torch.uint8).view(-1, size) for one in (recorded, recomputed)
        ]
        rows = (pair[0] != pair[1]).any(1).nonzero()
        if not len(rows):
            return ""
        place = int(rows[0])
        index = [int(i) for i in torch.unravel_index(torch.tensor(place), recorded.shape)]
        left, right = (one.reshape(-1)[place].item() for one in (recorded, recomputed))
        return (
            f"at {index}: recorded {left!r}, recomputed {right!r} ({len(rows)} of {recorded.numel()} differ)"
        )
    return f"recorded {recorded!r}, recomputed {recomputed!r}" if recorded != recomputed else ""


def compare_inputs(
    rank: int, recorded: Record, recomputed: Record, columns: StepColumns
) -> StepDifference | None:
    """Compares the samples as the trainer got them."""
    ours, theirs = recomputed["inputs"], recorded["inputs"]
    rollout, side = recorded["rollout"], "the saved samples are not those that the trainer got"
    if len(ours["samples"]) != len(theirs["samples"]):
        counts = f"recorded {len(theirs['samples'])}, recomputed {len(ours['samples'])}"
        return StepDifference(rollout, rank, "samples", "the number of samples", side, counts)
    rows = [
        i for i, pair in enumerate(zip(theirs["samples"], ours["samples"], strict=True)) if len(set(pair)) > 1
    ]
    names = [name for name in sorted({*ours["columns"], *theirs["columns"]}) if _differs(name, theirs, ours)]
    if rows:
        index = recorded["indices"][rows[0]] if recorded["indices"] else rows[0]
        for name in names:
            values, _ = columns.describe(name, rows[0], None)
            if values:
                return StepDifference(
                    rollout, rank, "samples", f"sample {index}, column {name},", side, values
                )
        return StepDifference(rollout, rank, "samples", f"sample {index}, column {' or '.join(names)}", side)
    if ours["schedule"] != theirs["schedule"]:
        return StepDifference(rollout, rank, "samples", "the micro-batches", side)
    return None


def _differs(name: str, theirs: Record, ours: Record) -> bool:
    return bool(theirs["columns"].get(name) != ours["columns"].get(name))


def compare_results(
    rank: int, recorded: Record, recomputed: Record, columns: StepColumns
) -> StepDifference | None:
    """Compares log-probs, advantages, loss and gradient norm."""
    rollout, theirs, ours = recorded["rollout"], recorded["results"], recomputed["results"]
    for name in sorted(
        {*theirs, *ours}, key=lambda name: (_ORDER.index(name) if name in _ORDER else 99, name)
    ):
        left, right = theirs.get(name), ours.get(name)
        if left == right:
            continue
        part = "log-probs" if "log_probs" in name else "advantages"
        if left is None or right is None or len(left) != len(right):
            return StepDifference(rollout, rank, part, f"column {name}", "only one side has the column")
        row = next(i for i, pair in enumerate(zip(left, right, strict=True)) if len(set(pair)) > 1)
        values, side = columns.describe(name, row, left[row])
        index = recorded["indices"][row] if recorded["indices"] else row
        return StepDifference(rollout, rank, part, f"sample {index}, column {name},", side, values)
    for number, (left, right) in enumerate(zip(recorded["steps"], recomputed["steps"], strict=True)):
        for name in sorted({*left, *right}, key=lambda name: ("loss" not in name, name)):
            if left.get(name) != right.get(name):
                shown = [
                    "none" if one is None else repr(float.fromhex(one))
                    for one in (left.get(name), right.get(name))
                ]
                values = f"recorded {shown[0]}, recomputed {shown[1]}"
                what = f"{name} of optimizer step {number}"
                return StepDifference(rollout, rank, "loss", what, RECOMPUTED, values)
    return None


def compare_state(
    rollout: int, rank: int, recorded: Mapping[str, str], recomputed: Mapping[str, str], side: str
) -> StepDifference | None:
    """Compares the digests of weights and optimizer. A tensor that only one side has counts if both have its kind."""
    common = recorded.keys() & recomputed.keys()
    names = [name for name in recorded if name in common and recorded[name] != recomputed[name]]
    if not names:
        return None
    weights = [name for name in names if not _is_optimizer(name)]
    first = (weights or names)[0]
    part = "optimizer" if _is_optimizer(first) else "weights"
    more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
    return StepDifference(rollout, rank, part, f"tensor {first}{more}", side, names=(first, *names))


def _is_optimizer(name: str) -> bool:
    return "optimizer " in name


def check_columns(record: Record, path: Path) -> str | None:
    """Returns the first sample of a file of saved columns that differs from the receipt, or None."""
    if not path.is_file():
        return f"{path} must be there as the run saved it, got no such file; restore it"
    saved = _read_columns(path)
    for name, digests in record["results"].items():
        for row, expected in enumerate(digests):
            if digest(saved[name][row]) != expected:
                index = record["indices"][row] if record["indices"] else row
                what = f"{path}: sample {index}, column {name}"
                return f"{what} must have the digest of the receipt, got other values; restore the file"
    return None


def count_compared(recorded: Sequence[Record]) -> int:
    """Returns the number of digests that a comparison of these records covers."""
    return sum(
        len(one["inputs"]["samples"]) + len(one["state"]) + sum(map(len, one["results"].values()))
        for one in recorded
    )
