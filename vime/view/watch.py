"""`vime watch RUN_DIR`: shows a run in the terminal, while it is running or after its end. Works over ssh, from 80 x 24
on.

It reads the run's journal and metrics, and changes nothing. `vime.view.watch_data` updates the data,
`vime.view.watch_draw` draws them, and `vime.view.watch_app` arranges them on the screen.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vime.view.watch_app import WatchApp


def main(argv: Sequence[str]) -> None:
    """Shows the run until `q`. Raises ValueError for a directory without a run, and without a terminal."""
    args = _parser().parse_args(argv)
    if args.every_s <= 0:
        raise ValueError(f"--every-s must be above 0, got {args.every_s:g}; give seconds")
    app = make_app(args.run_dir, args.every_s)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ValueError(
            "vime watch must have a terminal, got a file or a pipe; `vime doctor RUN_DIR` prints how a run is"
        )
    app.run()
    if app.problem is not None:
        raise app.problem


def make_app(run_dir: Path, every_s: float = 1.0) -> WatchApp:
    from vime.view.watch_app import WatchApp
    from vime.view.watch_data import WatchedRun

    return WatchApp(WatchedRun(run_dir), Path(run_dir).resolve().name, every_s)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vime watch", description="Show a run in the terminal until q is pressed.", allow_abbrev=False
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--every-s", type=float, default=1.0, help="seconds between two looks (default 1)")
    return parser
