"""Provides all readers of a run directory, for tests of damaged or hostile directories."""

from __future__ import annotations

import contextlib
import io
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from switch_bench.run_dirs import read_evaluations, read_steps

from slime.tracking.ledger import read_ledger
from slime.tracking.run_summary import run_summary
from vime.doctor.command import main as doctor
from vime.members.table import read_engines, table
from vime.view import watch_draw as draw
from vime.view.compare import main as compare
from vime.view.page.command import open_runs
from vime.view.page.export import write_page
from vime.view.plot import main as plot
from vime.view.trace import main as trace
from vime.view.watch_data import CURVES, WatchedRun


def _watch(run_dir: Path) -> str:
    look = WatchedRun(run_dir).look()
    lines = [*draw.head("run", look, 80), *draw.engines(look.summary, 60), *draw.slow_samples(look.slow, 40)]
    lines += draw.warnings(look.summary, 80)
    for curve in CURVES:
        lines += draw.curve(curve, look.curves.get(curve.title), 40, 5)
    return "\n".join(line.plain for line in lines)


def _fleet(run_dir: Path) -> str:
    return "\n".join(table(read_engines(run_dir), ended=False))


def _bench(run_dir: Path) -> str:
    return repr((read_steps(run_dir), read_evaluations(run_dir)))


READERS: dict[str, Callable[[Path], object]] = {
    "summary": run_summary,
    "ledger": read_ledger,
    "doctor": lambda run_dir: doctor([str(run_dir)]),
    "trace": lambda run_dir: trace([str(run_dir), "--out", str(run_dir.parent / "trace.json")]),
    "compare": lambda run_dir: compare([str(run_dir), str(run_dir)]),
    "ui": lambda run_dir: write_page(open_runs([run_dir]), run_dir.parent / "page.html"),
    "watch": _watch,
    "engines": _fleet,
    "bench": _bench,
}
SLOW: dict[str, Callable[[Path], object]] = {
    "plot": lambda run_dir: plot([str(run_dir), "--out", str(run_dir.parent / "plots")]),
}
"""Readers that draw pictures, which takes seconds."""


@contextlib.contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """Raises TimeoutError if the block takes longer, because a reader that waits for a pipe would never end."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"it took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def read_with(name: str, run_dir: Path) -> tuple[str, str | None]:
    """Returns (printed text or result of the reader, its ValueError or None). Other errors propagate to the caller."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), ends_within(60):
        try:
            found = (READERS | SLOW)[name](run_dir)
        except ValueError as error:
            return output.getvalue(), str(error)
    text = output.getvalue() + str(found)
    text.encode()  # a terminal cannot print half of a surrogate pair
    return text, None
