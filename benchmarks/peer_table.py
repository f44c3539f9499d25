"""Runs of against_peers.py, their record on disk, and its table.

A record is {"sessions": [...]}. A session is one call of the script: machine, versions, cases and runs. A later call
with the same --out adds its session, from the same machine or from another machine. The table compares round k of our
side with round k of another side in the same session, because they took turns. It shows lowest, median and highest.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer_cases import OURS, SIDES

ROWS = {
    "s per rollout": ("rollout_s", True),
    "  its generation": ("generation_s", True),
    "start, s": ("start_s", True),
    "end, s": ("end_s", True),
    "whole command, s": ("wall_s", True),
    "peak memory, GiB": ("peak_memory_gib", True),
    "peak GPU memory, GiB": ("peak_gpu_gib", True),
    "tokens per response": ("response_tokens", False),
    "reward": ("reward", False),
}
"""Row of the table -> field of a run, and whether less is better. Only such rows have a ratio."""


@dataclass(frozen=True)
class Run:
    """One command. Lists have one value per rollout. `generation_s` includes rewards on our side only.

    `start_s` ends when the first rollout begins, and `end_s` begins when the last rollout ends. The first `warm_up`
    rollouts do not count.
    """

    case: str
    side: str
    round: int
    warm_up: int
    rollout_s: list[float]
    generation_s: list[float]
    response_tokens: list[float]
    reward: list[float]
    start_s: float
    end_s: float
    wall_s: float
    peak_memory_gib: float
    peak_gpu_gib: float | None
    load_before: float
    parts_s: dict[str, list[float]]


def value_of(run: dict[str, Any], name: str) -> float | None:
    """Returns the median over the counted rollouts of a run, or its only value; None without a measurement."""
    value = run.get(name)
    if isinstance(value, list):
        counted = value[run.get("warm_up", 1) :]
        return statistics.median(counted) if counted else None
    return value


def spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"lowest": min(values), "median": statistics.median(values), "highest": max(values)}


def summary(sessions: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns case -> row -> side -> the spread over the runs in all sessions: {"of", "ratio"}. `ratio` is the value of
    this side divided by ours in the same round."""
    runs = [(number, run) for number, session in enumerate(sessions) for run in session["runs"]]
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for case in dict.fromkeys(run["case"] for _, run in runs):
        of_case = [(number, run) for number, run in runs if run["case"] == case]
        for row, (name, less_is_better) in ROWS.items():
            cells: dict[str, Any] = {}
            found = {(number, run["round"], run["side"]): value_of(run, name) for number, run in of_case}
            sides = {run["side"] for _, run in of_case}
            for side in filter(sides.__contains__, SIDES):
                mine = {key[:2]: v for key, v in found.items() if key[2] == side and v is not None}
                cells[side] = {"of": spread(list(mine.values()))}
                ours = {key: found.get((*key, OURS)) for key in mine}
                if less_is_better and side != OURS:
                    cells[side]["ratio"] = spread([v / ours[key] for key, v in mine.items() if ours[key]])
            if any(cell["of"] for cell in cells.values()):
                table.setdefault(case, {})[row.strip()] = cells
    return table


def text(sessions: Sequence[dict[str, Any]]) -> str:
    """Returns the table: lowest, median and highest. "/ ours" is a side divided by ours."""

    def shown(values: dict[str, float] | None) -> str:
        return "{lowest:.3g} / {median:.3g} / {highest:.3g}".format(**values) if values else "-"

    lines = []
    for case, rows in summary(sessions).items():
        sides = list(next(iter(rows.values())))
        count = sum(run["case"] == case for session in sessions for run in session["runs"])
        used = sum(any(run["case"] == case for run in session["runs"]) for session in sessions)
        columns = [*sides, *(f"{side} / ours" for side in sides if side != OURS)]
        head = f"{case}: {count} runs in {used} session{'s' * (used > 1)}; lowest / median / highest"
        lines += ["", head, f"{'':<20}" + "".join(f"{name:>26}" for name in columns)]
        for row in ROWS:
            if row.strip() not in rows:
                continue
            cells = rows[row.strip()]
            values = [cells[side]["of"] for side in sides]
            values += [cells[side].get("ratio") for side in sides if side != OURS]
            lines.append(f"{row:<20}" + "".join(f"{shown(value):>26}" for value in values))
    return "\n".join(lines[1:])


def read_sessions(path: Path) -> list[dict[str, Any]]:
    """Returns the sessions of a record. ValueError for a file that is not a record."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("sessions"), list):
        raise ValueError(
            f"--out must be a record of this script or a new file, got {path}; name another file"
        )
    return record["sessions"]


def write_sessions(path: Path, sessions: Sequence[dict[str, Any]]) -> None:
    path.write_text(
        json.dumps({"summary": summary(sessions), "sessions": sessions}, indent=1) + "\n", encoding="utf-8"
    )
