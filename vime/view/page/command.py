"""`vime ui RUN_DIR ... [--port N] [--export FILE.html]`: curves, timeline, samples and settings in a browser."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from slime.tracking.kinds import EVENTS_FILE
from slime.tracking.trackers import METRICS_FILE
from vime.run import interrupts
from vime.view.page.export import write_page
from vime.view.page.run_data import RunData
from vime.view.page.server import HOST, PageServer

PORT = 8410


def main(argv: Sequence[str]) -> int:
    """Returns exit code 0 after --export. Otherwise the server runs until Ctrl-C. Raises ValueError for an argument
    that the user can correct."""
    args = _parser().parse_args(argv)
    if not 0 <= args.port < 65536:
        raise ValueError(f"--port must be a port, 1 to 65535, or 0 for any, got {args.port}; correct it")
    runs = open_runs(args.run_dirs)
    if args.export is not None:
        print(write_page(runs, args.export), flush=True)
        return 0
    interrupts.catch_signals()
    asyncio.run(_serve(runs, args.port))
    return 0


def open_runs(run_dirs: Sequence[Path]) -> list[RunData]:
    """Opens and checks the runs. Their names are the last parts of their paths, and differ."""
    folders = [folder for run_dir in run_dirs for folder in runs_below(Path(run_dir).resolve())]
    if twice := [str(folder) for folder, count in Counter(folders).items() if count > 1]:
        raise ValueError(f"each RUN_DIR must be given once, got {twice[0]} twice; remove one")
    runs = [RunData(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    for run in runs:
        run.check()
    return runs


def runs_below(top: Path) -> list[Path]:
    """Returns the folder itself if it is a run or contains no run. Otherwise returns all runs below it, by name.

    Runs contain no other runs, and links to folders are not followed.
    """
    found = []
    for folder, below, files in os.walk(top):
        if EVENTS_FILE in files or METRICS_FILE in files:
            found.append(Path(folder))
            below.clear()
        below.sort()
    return found or [top]


def _names(folders: Sequence[Path]) -> list[str]:
    for parts in range(1, max(len(folder.parts) for folder in folders)):
        names = ["/".join(folder.parts[-parts:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return list(map(str, folders))


async def _serve(runs: Sequence[RunData], port: int) -> None:
    server = PageServer(runs)
    address = await server.start(port)
    print(address, flush=True)
    own = address.partition("?")[0].rstrip("/").rpartition(":")[2]
    print(
        f"Elsewhere: ssh -L {own}:{HOST}:{own} THIS_HOST, then the same address. Ctrl-C ends it.", flush=True
    )
    try:
        await asyncio.Event().wait()
    finally:
        await server.stop()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vime ui",
        description="Show runs in a browser, while they go on or after their end. Changes nothing.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "run_dirs",
        nargs="+",
        type=Path,
        metavar="RUN_DIR",
        help="the --run-dir of a run, or a folder with runs below it",
    )
    parser.add_argument("--port", type=int, default=PORT, help=f"on 127.0.0.1; 0 for any (default {PORT})")
    parser.add_argument(
        "--export", type=Path, metavar="FILE.html", help="write one HTML file instead of serving"
    )
    return parser
