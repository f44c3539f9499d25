"""Finds why a run ended: the first check of `vime doctor RUN_DIR`. Names a known cause in one line, from the run's
journal.

Each line of the table is one cause.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from slime.checkpoints.checkpoint_dir import latest
from slime.memory.measured import read_measured
from slime.tracking.concerns import STOPS_LEARNING
from slime.tracking.run_files import read_object
from slime.tracking.run_summary import RunSummary, run_summary
from slime.tracking.trackers import METRICS_FILE
from vime.doctor.finding import MIB, Finding, ok, one_line, problem, warning
from vime.run.temporary import SHARED_MEMORY, left_weights

_END = "end of the run"
_LONGEST = 300
_SHOWN = 4
"""Number of processes that a finding names."""
_LOOKED_AT = 4000
"""Number of an error's first characters that are searched. The journal keeps the same number."""


@dataclass(frozen=True)
class Cause:
    """A known cause. `pattern`: a regular expression that matches the type and text of the error that ended the run."""

    name: str
    pattern: str
    remedy: str


CAUSES = (
    Cause(
        "full disk",
        r"No space left|quota exceeded|File too large|must have room for|must have \S+ MiB of room",
        "remove files there or name another folder",
    ),
    Cause(
        "run directory removed",
        r"--run-dir must exist while its run is active",
        "start the run again: without its directory, a run has no metrics and no journal",
    ),
    Cause(
        "no permission",
        r"Read-only file system|Permission denied|Operation not permitted|must be a directory that this user can",
        "give this user the file or folder that the error names",
    ),
    Cause(
        "a process of Ray ended",
        r"RayLost|gcs_server|raylet",
        "look in dmesg for a kill",
    ),
    Cause(
        "out of memory",
        r"OutOfMemory|(?<!ran )out of (device )?memory|MemoryError|[Cc]annot allocate memory|HostMemory|"
        r"has killed \d+ process",
        "the error names the flags that lower memory; `vime plan --compare RUN_DIR` shows what each phase had",
    ),
    Cause(
        "process killed",
        r"died without an error of its own",
        "look in dmesg for the kernel's out-of-memory killer, and in logs/ for its last lines",
    ),
    Cause(
        "engine killed",
        r"\b(engine|router)\b.*\b(died|was lost|ended|exited|restarted)\b",
        "look in logs/engine-*.log and dmesg for why",
    ),
    Cause(
        "values that are not finite",
        r"DivergedError|FloatingPointError|must be finite|not finite",
        "lower --lr, and look at the batch with --save-debug-rollout-data",
    ),
    Cause(
        "wrong data",
        r"--(eval-)?prompt-data|--input-key|--label-key|--custom-rm|\breward\b|(?<!metrics)(?<!events)(?<!samples/\d)(?<!samples/\d\d)\.jsonl|\.parquet",
        "correct the data or the reward that the error names",
    ),
)


def check_end(run_dir: Path) -> list[Finding]:
    """Reports how the run ended, or its current state, and its repairs."""
    summary = run_summary(run_dir)
    return [
        *(_end(summary), *_concerns(summary), *_memory(summary)),
        *(*_repairs(summary), *_left(summary), *_damaged(summary)),
    ]


def verdict(run_dir: Path, ended: list[Finding], groups: list[Finding]) -> str:
    """Returns the last line about a run with problems, from the findings of `check_end` and of its groups."""
    run, parts = f"the run in {run_dir}", []
    problems = [one.name for one in ended if one.status == "problem"]
    if _END in problems:
        parts.append(f"{run} failed")
    if unlearned := [name for name in problems if name in STOPS_LEARNING]:
        parts.append(f"{run} learns nothing: {', '.join(unlearned)}")
    if disordered := [one.name for one in groups if one.status == "problem"]:
        parts.append(f"the records of {run} are not in order: {', '.join(disordered)}")
    return "; ".join(parts)


def _end(summary: RunSummary) -> Finding:
    done = "no rollout trained" if summary.rollout is None else f"{summary.rollout + 1} rollouts trained"
    if summary.rollouts:
        done += f" of {summary.rollouts}"
    if summary.state == "failed":
        cause = find_cause(summary)
        location = re.search(r"\(at ([^(),\n]+:\d+)[),]", summary.cause)
        first = f"look at {location[1]}; " if location else ""
        return problem(
            _END,
            f"{cause.name}: {one_line(summary.cause, _LONGEST)} ({done})",
            f"{first}{cause.remedy}; {describe_resume(summary)}",
        )
    if summary.state == "interrupted":
        return warning(_END, f"interrupted by its user ({done})", describe_resume(summary))
    if summary.state == "finished":
        return ok(_END, f"finished ({done})")
    silent = time.time() - summary.updated
    return ok(_END, f"it goes on ({done}); newest event {silent:.0f} s ago")


def describe_resume(summary: RunSummary) -> str:
    """Returns whether the run can be resumed, from which rollout, and which rollouts are lost."""
    save, trained = _save_folder(summary.run_dir), summary.rollout
    if trained is None:
        return "no rollout was trained, so the same command begins anew"
    lost = f"rollout{'s' if trained else ''} 0{f' to {trained}' if trained else ''}"
    if save is None:
        return f"it cannot be resumed, and {lost} must be trained again: the command had no --save"
    newest = summary.saved if not save.is_dir() else _newest(save)
    foreign = newest is not None and summary.saved is None and newest > trained
    if newest is None or foreign:
        return (
            f"it cannot be resumed, and {lost} must be trained again: no checkpoint is in {save}; --save-interval N "
            "saves every N rollouts"
        )
    where = f"the same command with --load {save} resumes it after rollout {newest}"
    if not save.is_dir():
        where = f"{save} is not here; with it, {where}"
    first = newest + 1
    if first > trained:
        return f"{where}, and no trained rollout is lost"
    again = f"rollout {trained} is" if first == trained else f"rollouts {first} to {trained} are"
    return f"{where}, and {again} trained again"


def _save_folder(run_dir: Path) -> Path | None:
    """Returns the run's --save folder, or None."""
    with contextlib.suppress(OSError, ValueError):
        section = read_object(run_dir, "config.json").get("checkpoint")
        found = section.get("save") if isinstance(section, dict) else None
        return Path(found) if isinstance(found, str) else None
    return None


def _newest(save: Path) -> int | None:
    """Returns the checkpoint from which a run with --load would resume. Returns None also for a record that cannot be
    read."""
    with contextlib.suppress(OSError, ValueError):
        return latest(save)
    return None


def _concerns(summary: RunSummary) -> list[Finding]:
    """Returns the run's concerns: a problem if a concern that stops learning lasted until the end or lasts now, else a
    warning."""
    found = []
    for name, event in summary.concerns.items():
        text, remedy = one_line(event["text"], _LONGEST), one_line(event["remedy"], _LONGEST)
        if event.kind == "concern_end":
            found.append(warning(name, f"until rollout {event['rollout']}: {text}", remedy))
            continue
        until = "now" if summary.state == "running" else "the end"
        detail = f"from rollout {event['rollout']} until {until}: {text}"
        found.append((problem if name in STOPS_LEARNING else warning)(one_line(name), detail, remedy))
    return found


def _memory(summary: RunSummary) -> list[Finding]:
    """Reports the run's highest memory use on a card and on the host, and the flags that its error names."""
    found = read_measured(summary.run_dir)
    if not found:
        return []
    shares = []
    cards = {phase: seen for phase, seen in found.items() if seen.cards}
    if cards:
        phase, seen = max(cards.items(), key=lambda pair: pair[1].card or 0.0)
        owners = ", ".join(f"{role} {size:.1f}" for role, size in sorted(seen.fullest().items()))
        shares.append(
            f"{seen.card:.1f} of {seen.card_total:.1f} GiB of a card in {phase} ({owners or 'owners hidden'})"
        )
    phase, seen = max(found.items(), key=lambda pair: pair[1].host)
    if seen.host_total:
        by_size = sorted(seen.processes.items(), key=lambda pair: -pair[1]["anonymous_gib"])[:_SHOWN]
        owners = ", ".join(f"{role} {sizes['anonymous_gib']:.1f}" for role, sizes in by_size)
        shares.append(f"{seen.host:.1f} of {seen.host_total:.1f} GiB of the host in {phase} ({owners})")
    flags = re.search(r"what lowers it: (.+)", summary.cause)
    if flags and summary.state == "failed":
        return [problem("memory", "; ".join(shares), flags[1])]
    return [ok("memory", "at most " + ", and ".join(shares))]


def find_cause(summary: RunSummary) -> Cause:
    """Returns the cause of a failed run: the first cause of the table that matches its error."""
    for cause in CAUSES:
        if re.search(cause.pattern, f"{summary.error_type}: {summary.cause[:_LOOKED_AT]}", re.DOTALL):
            return cause
    if not summary.error_type:
        if shutil.disk_usage(summary.run_dir).free < MIB:
            return CAUSES[0]
        return Cause("driver killed", "", "look in dmesg")
    return Cause(summary.error_type, "", f"see {summary.run_dir}/logs")


def _damaged(summary: RunSummary) -> list[Finding]:
    """Reports unreadable lines of the metrics. `vime.doctor.records` counts those of the journal."""
    count = summary.damaged[METRICS_FILE]
    remedy = "the readers leave them out; a run that resumes moves them to metrics.dropped.jsonl"
    return [warning(METRICS_FILE, f"{count} lines that cannot be read", remedy)] if count else []


def _left(summary: RunSummary) -> list[Finding]:
    """Reports weights left in shared memory. The watchdog removes them, unless it was killed with the rest of the
    run."""
    found = left_weights(SHARED_MEMORY, summary.run_dir)
    if not found:
        return []
    size = sum(file.stat().st_size for folder in found for file in folder.rglob("*") if file.is_file())
    names = ", ".join(map(str, found))
    return [
        warning(
            "shared memory",
            f"{size / MIB:.0f} MiB of weights in {names}, left by a run that was killed",
            f"remove them with rm -r {' '.join(map(str, found))}, or give the same command again",
        )
    ]


def _repairs(summary: RunSummary) -> list[Finding]:
    """Reports engines that died and were replaced, losses of the trainer, and the warnings of the logs."""
    found = []
    if summary.deaths:
        names = ", ".join(f"{name} {count} times" for name, count in sorted(summary.deaths.items()))
        found.append(warning("engines that died", names, "look in logs/engine-*.log and dmesg"))
    if summary.trainer:
        restarts = [event for event in summary.trainer if event.kind == "trainer_restarted"]
        seconds = sorted(event["seconds"] for event in restarts)
        how = f"restarted in {seconds[0]:.0f} to {seconds[-1]:.0f} s" if seconds else "not restarted"
        repeated = sum(event["repeated"] for event in restarts)
        found.append(
            warning(
                "losses of the trainer",
                f"{len(summary.trainer) - len(restarts)}, {how}; {repeated} steps were repeated with the same data",
                "the events of kind trainer_lost have the causes",
            )
        )
    if lost := [event for event in summary.manager if event.kind == "manager_lost"]:
        seconds = sorted(event["seconds"] for event in summary.manager if event.kind == "manager_restarted")
        how = f"restarted in {seconds[0]:.0f} to {seconds[-1]:.0f} s" if seconds else "not restarted"
        remedy = "the events of kind manager_lost have the causes"
        found.append(warning("losses of the rollout manager", f"{len(lost)}, {how}", remedy))
    if logged := [event for event in summary.warnings if event.kind == "warning"]:
        last = logged[-1]
        found.append(
            warning(
                "warnings",
                f"{len(logged)}, the last by {last['logger']}: {one_line(last['text'], _LONGEST)}",
                "the events of kind warning have all of them",
            )
        )
    return found
