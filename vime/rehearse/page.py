"""The page of a rehearsal: what ran, what would fail, and what differed from the launch."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Sequence

from vime.doctor.finding import Finding
from vime.rehearse.changes import FlagChange
from vime.rehearse.runs import Outcome

WIDTH = 118


def format_page(
    title: str, outcome: Outcome, changes: Sequence[FlagChange], notes: Sequence[str], wall_s: float
) -> str:
    """Returns the page as text."""
    findings = outcome.findings
    wrong = [finding for finding in findings if finding.status == "problem"]
    sections = {
        "Ran": outcome.done or ["nothing"],
        "Would fail": [_line(finding) for finding in wrong] or ["nothing was found"],
        "Checked": [f"{f.name}: {f.found}" for f in findings if f.status == "ok"],
        "Look at": [_line(finding) for finding in findings if finding.status == "warning"],
        "Notes": notes,
        "Differed from the launch": _changed(changes),
    }
    verdict = f"{len(wrong)} problems" if len(wrong) != 1 else "1 problem"
    head = f"rehearsal of {title}: {verdict}, {wall_s:.0f} s"
    return "\n".join([head, *(_section(name, lines) for name, lines in sections.items() if lines)])


def _line(finding: Finding) -> str:
    return f"{finding.name}: {finding.found}" + (f"; {finding.remedy}" if finding.remedy else "")


def _changed(changes: Sequence[FlagChange]) -> list[str]:
    """Returns one line per reason, with every flag that was changed for it."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for change in changes:
        value = "left out" if change.after is None else change.after
        before = "" if change.before is None else f"{change.before} -> "
        reasons[change.why].append(f"{change.flag} {before}{value}")
    return [f"{why}: {'; '.join(flags)}" for why, flags in reasons.items()]


def _section(name: str, lines: Sequence[str]) -> str:
    wrapped = [
        textwrap.fill(
            part,
            WIDTH,
            initial_indent="  " if first else "    ",
            subsequent_indent="    ",
            break_on_hyphens=False,
            break_long_words=False,
        )
        for line in lines
        for first, part in [(i == 0, part) for i, part in enumerate(line.splitlines())]
    ]
    return "\n".join([name, *wrapped])
