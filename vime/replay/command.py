"""`vime replay RUN --step N`: computes a recorded step again and compares all its bits. `--verify` checks receipts."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from slime.receipts.chain import Record
from slime.receipts.digests import digest
from slime.receipts.keys import read_public_key
from slime.receipts.origin import PACKAGES, digest_package
from slime.tracking.environment import installed_packages
from vime.replay.compare import (
    RECOMPUTED,
    StepColumns,
    StepDifference,
    compare_inputs,
    compare_results,
    compare_state,
    count_compared,
    first_element,
)
from vime.replay.job import COLUMNS
from vime.replay.ranks import read_values, replay
from vime.replay.source import RecordedRun, StartState, check_step, find_start, read_run
from vime.replay.verify import check_checkpoint, columns_path, verify

ALL = "all"


def main(argv: Sequence[str]) -> int:
    """Replays or verifies. Returns exit code 0 for equal bits, 1 for a difference. Raises ValueError for bad input."""
    parser = argparse.ArgumentParser(prog="vime replay", allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory of a run with --receipt")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--step", metavar="N", help="the rollout whose training is computed again, or all")
    what.add_argument("--verify", action="store_true", help="check receipts and files, without a trainer")
    parser.add_argument("--key", metavar="FILE", help="PEM file of the public key that must have signed")
    options = parser.parse_args(argv)
    public = None if options.key is None else read_public_key(options.key)
    if options.verify:
        return show_verified(options.run, public)
    if options.step != ALL and not options.step.isdigit():
        raise ValueError(
            f"--step must be the number of a step or all, got {options.step}; steps count from 0"
        )
    with tempfile.TemporaryDirectory(prefix="vime-replay-") as scratch:
        return show_replay(options.run, options.step, public, Path(scratch))


def show_verified(run_dir: Path, public: str | None) -> int:
    """Prints the result of a check."""
    began = time.perf_counter()
    found = verify(run_dir, public)
    for problem in found.problems:
        print(f"differs  {problem}")
    records, steps = sum(map(len, found.run.receipts)), found.run.steps
    signed = "not signed"
    if found.signer:
        signed = f"signed by {found.signer[:16]}" + ("" if public else ", which --key did not confirm")
    state = f"{len(found.problems)} problems" if found.problems else "whole"
    print(
        f"{state}: {records} records of {found.run.ranks} rank(s), {len(steps)} steps, {found.files} files, {signed} "
        f"({time.perf_counter() - began:.1f} s)"
    )
    return int(bool(found.problems))


def show_replay(run_dir: Path, step: str, public: str | None, scratch: Path) -> int:
    """Computes the steps again and prints the comparison."""
    run = read_run(run_dir, public)
    steps = run.steps if step == ALL else [int(step)]
    for number in steps:
        check_step(run, number)
    start = find_start(run, steps[-1], before=steps[0] if step == ALL else None)
    for note in list_origin_changes(run):
        print(f"note: {note}")
    again = range(start.first, steps[-1] + 1)
    more = "" if len(again) == len(steps) else f", {len(again) - len(steps)} steps to get to step {steps[0]}"
    print(f"replay of {'all steps' if step == ALL else f'step {step}'} from {start}{more}", flush=True)
    damaged = [] if start.iteration is None else check_checkpoint(run, start.iteration)
    for problem in damaged:
        print(f"differs  {problem}", flush=True)
    began = time.perf_counter()
    made = replay(run, start, steps[-1], scratch / "replay")
    seconds = time.perf_counter() - began
    difference = find_difference(run, made, list(again), scratch / "replay")
    if difference is not None:
        if difference.names:
            difference = with_values(run, start, difference, scratch)
        print(f"differs  {difference}")
        equal = sum(number < difference.rollout for number in steps)
        print(f"{equal} of {len(steps)} steps are equal ({seconds:.1f} s)")
        return 1
    records = [record for rank in range(run.ranks) for i in again if (record := run.step(rank, i))]
    print(
        f"0 differing bits: {len(steps)} of {len(steps)} steps, {count_compared(records):,} digests of samples, "
        f"log-probs, advantages, loss, gradient norm, weights and optimizer, {run.ranks} rank(s) ({seconds:.1f} s)"
    )
    if step != ALL:
        print(*describe_step(run.step(0, steps[0])), sep="\n")
    return int(bool(damaged))


def describe_step(record: Record | None) -> list[str]:
    """Returns loss and gradient norm per optimizer step, and the digest of the new weights."""
    assert record is not None
    lines = []
    for number, metrics in enumerate(record["steps"]):
        shown = [
            f"{name.removeprefix('train/')} {float.fromhex(metrics[name]):.6g}"
            for name in ("train/loss", "train/grad_norm")
            if name in metrics
        ]
        lines.append(f"optimizer step {number}: {', '.join(shown)}")
    return [*lines, f"weights and optimizer after the step: sha256 {digest_state(record)[:32]}"]


def digest_state(record: Record) -> str:
    """Returns one digest over all tensors of the state."""
    return digest(record["state"])


def list_origin_changes(run: RecordedRun) -> list[str]:
    """Returns notes on code and packages that differ from those of the run's last start."""
    begin = next(one for one in reversed(run.receipts[0]) if one["kind"] == "begin")
    code = [name for name in PACKAGES if begin["code"].get(name) != digest_package(name)]
    here = installed_packages()
    changed = [
        f"{name} {version} (here {here.get(name, 'none')})"
        for name, version in begin["packages"].items()
        if here.get(name) != version and name not in PACKAGES
    ]
    notes = [f"the code of {', '.join(code)} differs from the run's"] if code else []
    if any(one["flags"] != begin["flags"] for one in run.receipts[0] if one["kind"] == "begin"):
        notes.append(
            "the run resumed with other flags; config.json has the last ones, with which all steps are computed"
        )
    return notes + ([f"packages of the run: {', '.join(changed[:5])}"] if changed else [])


def find_difference(
    run: RecordedRun, made: list[list[Record]], steps: list[int], folder: Path
) -> StepDifference | None:
    """Returns the first difference over steps, parts and ranks."""
    ranks = range(run.ranks)
    for rank in ranks:
        recorded, ours = run.state_before(rank, steps[0]), made[rank][0]["state"]
        side = "the recorded side is damaged: the start state differs from the receipt"
        if (found := compare_state(steps[0] - 1, rank, recorded, ours, side)) is not None:
            return found
    for step in steps:
        again = [next(one for one in chain if one.get("rollout") == step) for chain in made]
        pairs = [
            (rank, record, again[rank]) for rank in ranks if (record := run.step(rank, step)) is not None
        ]
        for compare in (compare_inputs, compare_results):
            for rank, record, ours in pairs:
                written = folder / COLUMNS.format(rollout_id=step, rank=rank)
                columns = StepColumns(columns_path(run, step, rank), written)
                if (difference := compare(rank, record, ours, columns)) is not None:
                    return difference
        for rank, record, ours in pairs:
            if (found := compare_state(step, rank, record["state"], ours["state"], RECOMPUTED)) is not None:
                return found
    return None


def with_values(run: RecordedRun, start: StartState, found: StepDifference, scratch: Path) -> StepDifference:
    """Adds index and values of the first differing element, if two states are at hand: the checkpoint after the step,
    and the state that the replay computes from an earlier start."""
    step, names = found.rollout, found.names[:1]
    try:
        earlier = find_start(run, step, before=step)
    except ValueError:
        return found
    save = run.config.checkpoint.save
    saved = StartState(step + 1, save, step)
    if save is None or not saved.is_there:
        return found
    print(f"reading the values of {names[0]} from {saved}, and computing them from {earlier}", flush=True)
    replay(run, saved, step, scratch / "saved", names)
    recorded = read_values(scratch / "saved", found.rank).get(names[0])
    replay(run, earlier, step, scratch / "computed", names)
    computed = read_values(scratch / "computed", found.rank).get(names[0])
    return dataclasses.replace(found, values=first_element(recorded, computed))
