"""The record of a soak test as JSON, its page in Markdown, and its failures."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from operator_bench.machine import describe
from soak_faults import FAULTS
from soak_parts import (
    ALLOWED_COUNT,
    ALLOWED_PERCENT,
    BLOCK_STEPS,
    FEWEST_BLOCKS,
    MEASURED,
    WARM_UP_STEPS,
    Growth,
    Reading,
    Slope,
    growth,
)

from slime.tracking.journal import read_events
from slime.tracking.ledger import read_ledger
from slime.tracking.trackers import METRICS_FILE, MetricLines

SAMPLES = 32
"""Number of samples of a step."""


@dataclass
class Strike:
    """One fault at rollout `step`. `recovery_s` is None until the recovery. `restarted` is the time of the run's
    restart. `replies` is the number of replies that the proxy held, cut or lost."""

    kind: str
    step: int
    time: float
    replies_before: int = 0
    recovery_s: float | None = None
    restarted: float | None = None
    replies: int = 0


@dataclass(frozen=True)
class Task:
    """The settings of a soak test."""

    argv: list[str]
    steps: int
    staleness: int
    median_s: float
    worst_s: float
    note: str


def make_record(
    run_dir: Path,
    task: Task,
    strikes: Sequence[Strike],
    readings: Sequence[Reading],
    starts: int,
    not_caused: Sequence[tuple[int, str]],
    left_out: dict[str, str],
    broken: str | None,
) -> dict[str, Any]:
    """Returns the record of a soak test. `broken` is the reason if it ended before the last step."""
    ledger = read_ledger(run_dir)
    record: dict[str, Any] = {
        "machine": describe(torch.device("cpu"), ["scripts/soak.py", *task.argv], None),
        "note": task.note,
        "task": asdict(task),
        "starts": starts,
        "strikes": [asdict(strike) for strike in strikes],
        "not_caused": [kind for _, kind in not_caused],
        "left_out": left_out,
        "broken": broken,
        "speed": speed(run_dir),
        "parts": [asdict(growth(readings, part)) for part in MEASURED],
        "ledger": {
            "trained": ledger.groups_trained,
            "again": ledger.again,
            "dropped": +ledger.dropped,
            "lost": ledger.lost,
            "twice": sorted(ledger.twice),
            "over_limit": ledger.over_limit,
            "damaged": ledger.damaged,
        },
        "readings": [list(asdict(one).values()) for one in readings],
    }
    record["failures"] = failures(record, [growth(readings, part) for part in MEASURED])
    return record


def speed(run_dir: Path) -> dict[str, float]:
    """Returns the trained tokens per second of wall time, over the whole run with restarts and repeated steps."""
    ends = list(read_events(run_dir, ("step",)))
    if not ends:
        return {"steps": 0, "repeated": 0, "seconds": 0.0, "tokens_per_s": 0.0, "median_step_s": 0.0}
    path = run_dir / METRICS_FILE
    rows = list(MetricLines(path))
    lengths = {row["step"]: row["rollout/response_len/mean"] for row in rows if "perf/step_time" in row}
    seconds = ends[-1].time - next(read_events(run_dir)).time
    distinct = len({event["rollout"] for event in ends})
    return {
        "steps": distinct,
        "repeated": len(ends) - distinct,
        "seconds": seconds,
        "tokens_per_s": SAMPLES * sum(lengths.values()) / max(seconds, 1e-9),
        "median_step_s": statistics.median(row["perf/step_time"] for row in rows if "perf/step_time" in row),
    }


def recoveries(record: dict[str, Any], kind: str | None = None) -> list[float]:
    return [
        strike["recovery_s"]
        for strike in record["strikes"]
        if kind in (None, strike["kind"]) and strike["recovery_s"] is not None
    ]


def failures(record: dict[str, Any], parts: Sequence[Growth]) -> list[str]:
    """Returns the reasons why the soak test failed; empty if it passed."""
    task, ledger, times = record["task"], record["ledger"], recoveries(record)
    said = [f"the run broke: {record['broken']}"] if record["broken"] else []
    said += [f"a fault was never caused: {kind}" for kind in record["not_caused"]]
    said += [
        f"no recovery from {strike['kind']} at step {strike['step']}"
        for strike in record["strikes"]
        if strike["recovery_s"] is None
    ]
    said += [
        f"{strike['kind']} at step {strike['step']} hit no reply"
        for strike in record["strikes"]
        if strike["kind"].endswith(" replies") and not strike["replies"]
    ]
    if times and statistics.median(times) > task["median_s"]:
        said.append(f"the median recovery took {statistics.median(times):.1f} s, above {task['median_s']:g}")
    if times and max(times) > task["worst_s"]:
        said.append(f"the longest recovery took {max(times):.1f} s, above {task['worst_s']:g}")
    for name, what in (
        ("lost", "groups were lost"),
        ("twice", "groups are in two batches"),
        ("over_limit", "samples were too old"),
    ):
        if ledger[name]:
            said.append(f"{what}: {ledger[name]}")
    said += [f"{part.part} grows: {shown(part)}" for part in parts if part.is_too_fast]
    return said


def shown(part: Growth) -> str:
    def slope(value: Slope | None, unit: str) -> str:
        if value is None:
            return "not judged"
        return f"{value.value:+.2f}{unit} (2 s.e. {value.uncertainty:.2f})"

    return (
        f"memory {slope(part.memory, '%')}, files {slope(part.files, '')}, threads {slope(part.threads, '')} "
        "per 100 steps"
    )


def markdown(record: dict[str, Any]) -> str:
    """Returns the page of a soak test."""
    task, machine = record["task"], record["machine"]
    lines = [
        f"# A soak of {task['steps']} steps",
        "",
        f"`{machine['command']}`, {machine['date']}, commit {str(machine['commit'])[:7]}. {record['note']}".strip(),
        "",
        "**Passed.**" if not record["failures"] else "**Failed.**",
        *[f"- {failure}" for failure in record["failures"]],
        *[f"- LEFT OUT: {kind}: {why}" for kind, why in record["left_out"].items()],
        "",
        *_faults(record),
        "",
        *_speed_and_ledger(record["speed"], record["ledger"]),
        "",
        *_growth(record["parts"]),
    ]
    return "\n".join(lines) + "\n"


def _faults(record: dict[str, Any]) -> list[str]:
    task, times = record["task"], recoveries(record)
    lines = [
        f"{len(record['strikes'])} faults, {record['starts']} starts of the run. Recovery: median "
        f"{statistics.median(times or [0]):.1f} s (allowed {task['median_s']:g}), worst {max(times, default=0):.1f} s "
        f"(allowed {task['worst_s']:g}).",
        "",
        "| fault | times | run started again | median recovery | worst |",
        "| --- | --- | --- | --- | --- |",
    ]
    for kind in FAULTS:
        if found := recoveries(record, kind):
            again = sum(s["kind"] == kind and s["restarted"] is not None for s in record["strikes"])
            lines.append(
                f"| {kind} | {len(found)} | {again} | {statistics.median(found):.1f} s | {max(found):.1f} s |"
            )
    return lines


def _speed_and_ledger(speeds: dict[str, Any], ledger: dict[str, Any]) -> list[str]:
    dropped = ", ".join(f"{reason} {count}" for reason, count in sorted(ledger["dropped"].items())) or "none"
    return [
        f"Speed: {speeds['steps']} steps in {speeds['seconds']:.0f} s, {speeds['repeated']} of them twice; "
        f"{speeds['tokens_per_s']:.0f} tokens per second, all faults included; median step "
        f"{speeds['median_step_s']:.2f} s.",
        "",
        f"Ledger: {ledger['trained']} groups trained, {ledger['again']} drawn again after a restart, dropped: "
        f"{dropped}, lost: {ledger['lost'] or 'none'}, in two batches: {ledger['twice'] or 'none'}, samples too old: "
        f"{ledger['over_limit']}, damaged lines: {ledger['damaged']}.",
    ]


def _growth(parts: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        f"Growth per 100 steps, after the first {WARM_UP_STEPS} of each process. Allowed: {ALLOWED_PERCENT:g}% of "
        f"memory, {ALLOWED_COUNT:g} files, {ALLOWED_COUNT:g} threads, beyond two standard errors (in brackets). Fewer "
        f"than {FEWEST_BLOCKS * BLOCK_STEPS} counted steps are not judged.",
        "",
        "| part | processes | steps counted | mean memory | memory | files | threads |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for part in parts:
        cells = [
            "not judged" if slope is None else f"{slope['value']:+.2f}{unit} ({slope['uncertainty']:.2f})"
            for slope, unit in ((part["memory"], "%"), (part["files"], ""), (part["threads"], ""))
        ]
        lines.append(
            f"| {part['part']} | {part['processes']} | {part['blocks'] * BLOCK_STEPS} | {part['memory_mib']:.0f} MiB | "
            f"{' | '.join(cells)} |"
        )
    return lines


def write(record: dict[str, Any], out: Path) -> None:
    """Writes `out`.json and `out`.md, for any suffix of `out`."""
    out.with_suffix(".md").write_text(markdown(record), encoding="utf-8")
    text = json.dumps({key: value for key, value in record.items() if key != "readings"}, indent=1)
    readings = json.dumps(record["readings"])
    out.with_suffix(".json").write_text(f'{text[:-2]},\n "readings": {readings}\n}}\n', encoding="utf-8")
