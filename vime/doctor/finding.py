"""Defines findings, the results of checks: their three statuses, the description of the wanted run, and the printed
form of untrusted text."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

MIB = 2**20
GIB = 2**30

_ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[@-Z\\^_])")
"""Escape sequences that set colours, move the cursor, or name the window."""

Status = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the report. A problem stops a run. A warning may slow a run or stop a larger run."""

    name: str
    status: Status
    found: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True)
class WantedRun:
    """The run for which the machine is checked. `device` is cpu or cuda."""

    device: str = "cpu"
    run_dir: Path = Path("runs")
    hf_checkpoint: Path | None = None


def ok(name: str, found: str) -> Finding:
    return Finding(name, "ok", found)


def warning(name: str, found: str, remedy: str) -> Finding:
    return Finding(name, "warning", found, remedy)


def problem(name: str, found: str, remedy: str) -> Finding:
    return Finding(name, "problem", found, remedy)


def judge(name: str, found: str, remedy: str, *, fails: bool, poor: bool) -> Finding:
    """Returns a problem if `fails`, else a warning if `poor`, else ok."""
    if fails:
        return problem(name, found, remedy)
    return warning(name, found, remedy) if poor else ok(name, found)


def size(amount: float) -> str:
    """Formats a number of bytes with a readable unit."""
    return f"{amount / GIB:,.1f} GiB" if amount >= GIB else f"{amount / MIB:,.0f} MiB"


def one_line(text: object, longest: int | None = None) -> str:
    """Returns a run's text on one line, without characters that change a terminal: colours of a log, control
    characters."""
    plain = "".join(c if c.isprintable() else " " for c in _ESCAPE.sub("", str(text)))
    line = " ".join(plain.split())
    return line if longest is None or len(line) <= longest else line[: longest - 3] + "..."
