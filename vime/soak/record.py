"""The record of a soak as JSON values, and the reasons why the soak failed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

from slime.tracking.environment import ENVIRONMENT_FILE
from slime.tracking.journal import read_events
from slime.tracking.ledger import Ledger, read_ledger
from slime.tracking.run_files import read_object
from slime.tracking.run_summary import run_summary
from slime.tracking.trackers import METRICS_FILE, MetricLines
from vime.doctor.finding import Finding, problem
from vime.doctor.records import check_groups
from vime.soak.faults import FAULTS
from vime.soak.growth import MEASURED, Growth, Reading, find_growth
from vime.soak.plan import Planned
from vime.soak.runner import Strike


@dataclass(frozen=True)
class SoakSettings:
    """The settings of a soak. A step has `samples` samples. `median_s` and `worst_s` are the longest recoveries that
    pass, or None."""

    command: list[str]
    first: int
    steps: int
    every: int
    quiet_steps: int
    kinds: list[str]
    seed: int
    staleness: int
    samples: int
    median_s: float | None
    worst_s: float | None
    note: str


class Speed(TypedDict):
    """Steps of the run, those that were trained again after a restart, and their times in seconds."""

    steps: int
    repeated: int
    seconds: float
    median_step_s: float


class SoakFigures(TypedDict):
    """The figures of a soak: its faults, and the seconds of the median and the longest recovery."""

    faults: int
    median_s: float
    worst_s: float


class Record(TypedDict):
    """The record of a soak. `broken` is the reason if the run did not reach its last step."""

    environment: dict[str, object]
    settings: SoakSettings
    measured: SoakFigures
    starts: int
    strikes: list[Strike]
    not_caused: list[Planned]
    broken: str | None
    speed: Speed
    proof: list[Finding]
    growth: list[Growth]
    readings: list[Reading]
    failures: list[str]


def make_record(
    run_dir: Path,
    settings: SoakSettings,
    strikes: Sequence[Strike],
    readings: Sequence[Reading],
    starts: int,
    not_caused: Sequence[Planned],
    broken: str | None,
) -> Record:
    """Returns the record. Raises ValueError if the run has no journal."""
    record = Record(
        environment=_environment(run_dir),
        settings=settings,
        measured=measure_recoveries(strikes),
        starts=starts,
        strikes=list(strikes),
        not_caused=list(not_caused),
        broken=broken,
        speed=measure_speed(run_dir),
        proof=prove(run_dir, settings),
        growth=[find_growth(readings, part, settings.samples) for part in MEASURED],
        readings=list(readings),
        failures=[],
    )
    record["failures"] = list_failures(record)
    return record


def _environment(run_dir: Path) -> dict[str, object]:
    """Returns the versions, the machine and the commit from the run's environment.json."""
    found = read_object(run_dir, ENVIRONMENT_FILE)
    python = found.get("python")
    version = python.get("version") if isinstance(python, dict) else None
    kept = {name: found.get(name) for name in ("time", "git", "packages", "cpu", "gpus")}
    return {**kept, "python": version}


def prove(run_dir: Path, settings: SoakSettings) -> list[Finding]:
    """Returns the findings of `vime doctor RUN_DIR` about the groups, with stricter rules: every step was trained, and
    no sample was older than --max-staleness."""
    steps = _steps(read_ledger(run_dir), settings)
    return [steps, _end(run_dir), *check_groups(run_dir, age_fails=True)]


def _steps(ledger: Ledger, settings: SoakSettings) -> Finding:
    missing = [
        step for step in range(settings.first, settings.first + settings.steps) if step not in ledger.trained
    ]
    if not missing:
        return Finding("steps", "ok", f"all {settings.steps} trained")
    shown = ", ".join(map(str, missing[:8]))
    return problem(
        "steps", f"{len(missing)} of {settings.steps} not trained: {shown}", "see the run's output"
    )


def _end(run_dir: Path) -> Finding:
    summary = run_summary(run_dir)
    if summary.state == "finished":
        return Finding("end of the run", "ok", "finished")
    return problem("end of the run", f"{summary.state}: {summary.cause}", f"vime doctor {run_dir}")


def measure_speed(run_dir: Path) -> Speed:
    """Returns the steps and times of the whole run, with restarts and repeated steps."""
    ends = list(read_events(run_dir, ("step",)))
    if not ends:
        return Speed(steps=0, repeated=0, seconds=0.0, median_step_s=0.0)
    times = [row["perf/step_time"] for row in MetricLines(run_dir / METRICS_FILE) if "perf/step_time" in row]
    distinct = len({event["rollout"] for event in ends})
    return Speed(
        steps=distinct,
        repeated=len(ends) - distinct,
        seconds=ends[-1].time - next(read_events(run_dir)).time,
        median_step_s=statistics.median(times or [0.0]),
    )


def measure_recoveries(strikes: Sequence[Strike]) -> SoakFigures:
    times = [one.recovery_s for one in strikes if one.recovery_s is not None] or [0.0]
    return SoakFigures(faults=len(strikes), median_s=statistics.median(times), worst_s=max(times))


def recoveries(record: Record, kind: str | None = None) -> list[float]:
    """Returns the seconds of the recoveries from faults of one kind, or from all faults."""
    return [
        strike.recovery_s
        for strike in record["strikes"]
        if kind in (None, strike.kind) and strike.recovery_s is not None
    ]


def list_failures(record: Record) -> list[str]:
    """Returns the reasons why the soak failed. The list is empty if it passed."""
    settings = record["settings"]
    found = [f"the run broke: {record['broken']}"] if record["broken"] else []
    found += [f"{one.name}: {one.found}; {one.remedy}" for one in record["proof"] if one.status == "problem"]
    if not record["strikes"]:
        found.append("no fault was caused, so the soak proves nothing")
    found += [
        f"{one.kind}, planned for step {one.step}, was not caused: the soak needs more --steps or a larger --every"
        for one in record["not_caused"]
    ]
    found += [
        f"no recovery from {one.kind} at step {one.step}"
        for one in record["strikes"]
        if one.recovery_s is None
    ]
    found += [
        f"{one.kind} at step {one.step} affected no reply: the run's requests do not go through its generate function"
        for one in record["strikes"]
        if FAULTS[one.kind].hits_replies and not one.replies
    ]
    measured = record["measured"]
    for name, value, allowed in (
        ("median", measured["median_s"], settings.median_s),
        ("longest", measured["worst_s"], settings.worst_s),
    ):
        if allowed is not None and value > allowed:
            found.append(f"the {name} recovery took {value:.1f} s, above {allowed:g} s")
    found += [f"{part.part} grows: {part.text}" for part in record["growth"] if part.is_too_fast]
    return found


def write_record(record: Record, path: Path) -> None:
    """Writes the record as JSON. The readings are on one line, because they are many."""
    whole = {
        **record,
        "settings": asdict(record["settings"]),
        "strikes": [asdict(one) for one in record["strikes"]],
        "not_caused": [asdict(one) for one in record["not_caused"]],
        "proof": [asdict(one) for one in record["proof"]],
        "growth": [asdict(one) for one in record["growth"]],
    }
    del whole["readings"]
    text = json.dumps(whole, indent=1)
    readings = json.dumps([list(asdict(one).values()) for one in record["readings"]])
    path.write_text(f'{text[:-2]},\n "readings": {readings}\n}}\n', encoding="utf-8")
