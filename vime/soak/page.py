"""The page of a soak in Markdown: verdict, recoveries, proof, speed and growth of memory."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterator, Sequence

from vime.doctor.finding import one_line
from vime.soak.faults import FAULTS
from vime.soak.growth import (
    ALLOWED_COUNT,
    ALLOWED_PERCENT,
    BLOCK_STEPS,
    FEWEST_BLOCKS,
    WARM_UP_REQUESTS,
    WARM_UP_STEPS,
    Growth,
    Slope,
)
from vime.soak.record import Record, recoveries


def format_page(record: Record) -> str:
    """Returns the page of a soak."""
    settings, environment = record["settings"], record["environment"]
    git = environment.get("git")
    commit = f", commit {str(git['commit'])[:7]}" if isinstance(git, dict) and git.get("commit") else ""
    lines = [
        f"# A soak of {settings.steps} steps",
        "",
        f"{environment.get('time')}{commit}. {settings.note}".strip(),
        "",
        "```bash",
        shlex.join(["vime", "soak", *settings.command]),
        "```",
        "",
        "**Passed.**" if not record["failures"] else "**Failed.**",
        *[f"- {one_line(failure, 400)}" for failure in record["failures"]],
        "",
        *_recovery_lines(record),
        "",
        *_proof_lines(record),
        "",
        *_strike_lines(record),
        "",
        *_growth_lines(record["growth"]),
    ]
    return "\n".join(lines) + "\n"


def _recovery_lines(record: Record) -> Iterator[str]:
    settings, measured, speed = record["settings"], record["measured"], record["speed"]

    def allowed(limit_s: float | None) -> str:
        return "" if limit_s is None else f" (allowed {limit_s:g} s)"

    yield (
        f"{measured['faults']} faults, {record['starts']} starts of the command. Recovery: median "
        f"{measured['median_s']:.1f} s{allowed(settings.median_s)}, worst {measured['worst_s']:.1f} s"
        f"{allowed(settings.worst_s)}. The recovery is the time from a fault until no group from before the fault can "
        f"still run: the end of the first step whose batch was made after the fault, plus --max-staleness "
        f"{settings.staleness} more steps."
    )
    yield ""
    yield "| fault | times | command started again | median recovery | worst |"
    yield "| --- | --- | --- | --- | --- |"
    for kind in FAULTS:
        if found := recoveries(record, kind):
            again = sum(one.kind == kind and one.restarted is not None for one in record["strikes"])
            median, worst = statistics.median(found), max(found)
            yield f"| {kind} | {len(found)} | {again} | {median:.1f} s | {worst:.1f} s |"
    yield ""
    yield (
        f"{speed['steps']} steps in {speed['seconds']:.0f} s, {speed['repeated']} of them twice; median step "
        f"{speed['median_step_s']:.2f} s."
    )


def _proof_lines(record: Record) -> Iterator[str]:
    yield "The proof, from the ledger of the run:"
    yield ""
    yield "| check | result | found |"
    yield "| --- | --- | --- |"
    for finding in record["proof"]:
        yield f"| {finding.name} | {finding.status} | {one_line(finding.found, 300).replace('|', '/')} |"


def _strike_lines(record: Record) -> Iterator[str]:
    yield f"The faults in their order (seed {record['settings'].seed}):"
    yield ""
    yield "| step | fault | recovery | command started again |"
    yield "| --- | --- | --- | --- |"
    for one in record["strikes"]:
        recovery = "none" if one.recovery_s is None else f"{one.recovery_s:.1f} s"
        yield f"| {one.step} | {one.kind} | {recovery} | {'no' if one.restarted is None else 'yes'} |"


def _growth_lines(parts: Sequence[Growth]) -> Iterator[str]:
    yield (
        f"Growth per 100 steps, after the first {WARM_UP_STEPS} of each process, and after the first "
        f"{WARM_UP_REQUESTS['router']} requests of a router. Allowed: {ALLOWED_PERCENT:g}% of memory, "
        f"{ALLOWED_COUNT:g} files, {ALLOWED_COUNT:g} threads, beyond two standard errors (in brackets). Fewer than "
        f"{FEWEST_BLOCKS * BLOCK_STEPS} counted steps are not judged."
    )
    yield ""
    yield "| part | processes | steps counted | mean memory | memory | files | threads |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for part in parts:
        cells = " | ".join(
            _slope(slope, unit) for slope, unit in ((part.memory, "%"), (part.files, ""), (part.threads, ""))
        )
        steps = part.blocks * BLOCK_STEPS
        yield f"| {part.part} | {part.processes} | {steps} | {part.memory_mib:.0f} MiB | {cells} |"


def _slope(slope: Slope | None, unit: str) -> str:
    return "not judged" if slope is None else f"{slope.value:+.2f}{unit} ({slope.uncertainty:.2f})"
