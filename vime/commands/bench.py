"""`vime bench` runs the benchmarks of a checkout (`benchmarks/switch_bench`). An installed vime has no benchmarks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def main(argv: Sequence[str]) -> int:
    """Returns the exit status of the benchmark's command. Raises ValueError outside of a checkout."""
    if not (BENCHMARKS / "switch_bench").is_dir():
        raise ValueError(
            "vime bench must run in a checkout of vime, got an installed package without benchmarks; clone the "
            f"repository, set it up as its README describes, and run `vime {' '.join(['bench', *argv])}` there"
        )
    if str(BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(BENCHMARKS))
    status: int = importlib.import_module("switch_bench.command").main(argv)
    return status
