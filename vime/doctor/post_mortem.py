"""Why a run ended: the first check of `vime doctor RUN_DIR`. Names a known cause in one line, from the run's journal.

Another cause is one line of the table.
"""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from slime.memory.measured import measured_of
from slime.tracking.run_summary import RunSummary, run_summary
from slime.tracking.trackers import METRICS_FILE
from vime.doctor.finding import MIB, Finding, ok, one_line, problem, warning

_LONGEST = 300
_SHOWN = 4
"""Processes that are named."""
_LOOKED_AT = 4000
"""Characters of an error: as many as the journal keeps."""


@dataclass(frozen=True)
class Cause:
    """`said`: the expression that finds it in the type and the text of the error that ended the run."""

    name: str
    said: str
    remedy: str


CAUSES = (
    Cause(
        "full disk",
        r"No space left|quota exceeded|File too large|must have room for|must have \S+ MiB of room",
        "remove files there or name another folder, then give the same command with --load: it resumes",
    ),
    Cause(
        "run directory removed",
        r"--run-dir must stay",
        "start the run again: without its directory, a run has no metrics and no journal",
    ),
    Cause(
        "no permission",
        r"Read-only file system|Permission denied|Operation not permitted|must be a directory that this user can",
        "give this user the file or folder that the error names, then give the same command with --load: it resumes",
    ),
    Cause(
        "a process of Ray ended",
        r"RayLost|gcs_server|raylet",
        "look in dmesg for a kill, then give the same command with --load: it resumes",
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
        "look in logs/engine-*.log and dmesg for why, then give the same command with --load: it resumes",
    ),
    Cause(
        "values that are not finite",
        r"DivergedError|FloatingPointError|must be finite|not finite",
        "resume from a checkpoint before it with a lower --lr, and look at the batch with --save-debug-rollout-data",
    ),
    Cause(
        "wrong data",
        r"--(eval-)?prompt-data|--input-key|--label-key|--custom-rm|\breward\b|(?<!metrics)(?<!events)(?<!samples/\d)(?<!samples/\d\d)\.jsonl|\.parquet",
        "correct the data or the reward that the error names",
    ),
)


def check_end(run_dir: Path) -> list[Finding]:
    """How the run ended, or what it does, and how often it had to repair itself."""
    summary = run_summary(run_dir)
    return [_end(summary), *_memory(summary), *_repairs(summary), *_damaged(summary)]


def _end(summary: RunSummary) -> Finding:
    done = "no rollout trained" if summary.rollout is None else f"{summary.rollout + 1} rollouts trained"
    if summary.rollouts:
        done += f" of {summary.rollouts}"
    if summary.state == "failed":
        cause = cause_of(summary)
        return problem(
            "end of the run", f"{cause.name}: {one_line(summary.cause, _LONGEST)} ({done})", cause.remedy
        )
    if summary.state == "interrupted":
        return warning(
            "end of the run", f"interrupted by its user ({done})", "the same command with --load resumes it"
        )
    if summary.state == "finished":
        return ok("end of the run", f"finished ({done})")
    silent = time.time() - summary.updated
    return ok("end of the run", f"it goes on ({done}); newest event {silent:.0f} s ago")


def _memory(summary: RunSummary) -> list[Finding]:
    """Where the run had the most memory on a card and on the host, and the flags that its error names."""
    found = measured_of(summary.run_dir)
    if not found:
        return []
    told = []
    cards = {phase: seen for phase, seen in found.items() if seen.cards}
    if cards:
        phase, seen = max(cards.items(), key=lambda pair: pair[1].card or 0.0)
        owners = ", ".join(f"{role} {size:.1f}" for role, size in sorted(seen.fullest().items()))
        told.append(
            f"{seen.card:.1f} of {seen.card_total:.1f} GiB of a card in {phase} ({owners or 'owners hidden'})"
        )
    phase, seen = max(found.items(), key=lambda pair: pair[1].host)
    if seen.host_total:
        by_size = sorted(seen.processes.items(), key=lambda pair: -pair[1]["anonymous_gib"])[:_SHOWN]
        owners = ", ".join(f"{role} {sizes['anonymous_gib']:.1f}" for role, sizes in by_size)
        told.append(f"{seen.host:.1f} of {seen.host_total:.1f} GiB of the host in {phase} ({owners})")
    flags = re.search(r"what lowers it: (.+)", summary.cause)
    if flags and summary.state == "failed":
        return [problem("memory", "; ".join(told), flags[1])]
    return [ok("memory", "at most " + ", and ".join(told))]


def cause_of(summary: RunSummary) -> Cause:
    """The cause of a run that failed: the first of the table that its error names."""
    for cause in CAUSES:
        if re.search(cause.said, f"{summary.error_type}: {summary.cause[:_LOOKED_AT]}", re.DOTALL):
            return cause
    if not summary.error_type:
        if shutil.disk_usage(summary.run_dir).free < MIB:
            return CAUSES[0]
        return Cause("driver killed", "", "look in dmesg; the same command with --load resumes the run")
    return Cause(summary.error_type, "", f"see {summary.run_dir}/logs")


def _damaged(summary: RunSummary) -> list[Finding]:
    """Of the metrics; `vime.doctor.records` counts the lines of the journal."""
    count = summary.damaged[METRICS_FILE]
    remedy = "the readers leave them out; a run that resumes moves them to metrics.dropped.jsonl"
    return [warning(METRICS_FILE, f"{count} lines that cannot be read", remedy)] if count else []


def _repairs(summary: RunSummary) -> list[Finding]:
    """Engines that died and were replaced, and the warnings of the logs."""
    found = []
    if summary.deaths:
        names = ", ".join(f"{name} {count} times" for name, count in sorted(summary.deaths.items()))
        found.append(warning("engines that died", names, "look in logs/engine-*.log and dmesg"))
    if summary.warnings:
        last = summary.warnings[-1]
        found.append(
            warning(
                "warnings",
                f"{len(summary.warnings)}, the last by {last['logger']}: {one_line(last['text'], _LONGEST)}",
                "the events of kind warning have all of them",
            )
        )
    return found
