"""`vime checkpoint verify DIR`: compares the files of checkpoints with the checksums that were saved with them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from slime.checkpoints.checkpoint_dir import COMPLETE, existing
from slime.checkpoints.checkpoint_files import damage, iterations, read_sums


def main(argv: Sequence[str]) -> int:
    """Prints one line per iteration. Returns exit code 1 unless all are intact. Raises ValueError if DIR holds no
    checkpoint."""
    parser = argparse.ArgumentParser(prog="vime checkpoint", allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True)
    verify = actions.add_parser("verify", help="compare the files of checkpoints with their checksums")
    verify.add_argument("directory", type=Path, metavar="DIR", help="folder of iterations, or one iteration")
    directory = parser.parse_args(argv).directory
    paths = [directory]
    if not (directory / COMPLETE).is_file():
        paths = [existing(directory, number) for number in iterations(directory)]
    if not paths:
        raise ValueError(f"DIR must hold a checkpoint, got none in {directory}; name the folder of --save")
    whole = [_verified(path) for path in paths]
    return int(not all(whole))


def _verified(path: Path) -> bool:
    began = time.perf_counter()
    try:
        sums = read_sums(path)
        found = None if sums is None else damage(path, sums)
    except (ValueError, OSError) as error:
        sums, found = {}, str(error)
    seconds = time.perf_counter() - began
    if sums is None:
        print(f"{path}: not verified, it has no checksums (an earlier version saved it)")
    elif found is not None:
        print(f"{path}: damaged: {found}")
    else:
        size = sum(saved.bytes for saved in sums.values())
        rate = f"{size / 1e6 / max(seconds, 1e-9):,.0f} MB/s"
        print(f"{path}: whole ({len(sums)} files, {size / 1e9:.3g} GB, {rate})")
    return sums is not None and found is None
