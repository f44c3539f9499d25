"""Checks of the records of a run: `vime doctor RUN_DIR`."""

from __future__ import annotations

from pathlib import Path

from slime.tracking.ledger import Ledger, read_ledger
from vime.doctor.finding import Finding, judge, ok

_SHOWN = 8


def check_groups(run_dir: Path, *, age_fails: bool = False) -> list[Finding]:
    """Checks that every group was trained or dropped exactly once. Samples that are too old are a warning, or with
    `age_fails` a problem. Raises ValueError without a run's events."""
    ledger = read_ledger(run_dir)
    age = _age(ledger, age_fails)
    return [_counts(ledger), _lost(ledger), _twice(ledger), _prompts(ledger), age, _file(ledger)]


def _counts(ledger: Ledger) -> Finding:
    dropped = ", ".join(f"{count} {reason}" for reason, count in ledger.dropped.most_common() if count)
    left = ledger.samples_left_out
    return ok(
        "groups",
        f"{ledger.groups_trained} trained in {len(ledger.trained)} rollouts, dropped: {dropped or 'none'}, "
        f"{f'{left} samples left out of optimizer steps, ' if left else ''}"
        f"{len(ledger.running)} in no batch yet; {ledger.starts} starts, {ledger.again} groups drawn again",
    )


def _lost(ledger: Ledger) -> Finding:
    return judge(
        "lost groups",
        _some(ledger.lost),
        "a resumed run did not draw them again: was --load or the data source changed?",
        fails=bool(ledger.lost),
        poor=False,
    )


def _twice(ledger: Ledger) -> Finding:
    return judge(
        "groups in two batches",
        _some(sorted(ledger.twice)),
        "the data source gave them twice: check --data-source-path",
        fails=bool(ledger.twice),
        poor=False,
    )


def _prompts(ledger: Ledger) -> Finding:
    """Checks that each prompt of a data set comes once per epoch, also over restarts."""
    jumps = ledger.jumps
    problems = [f"group {group} had two prompts" for group in sorted(ledger.moved)]
    problems += [
        f"before group {group} {abs(count)} prompts {'were left out' if count > 0 else 'came again'}"
        for group, count in jumps
    ]
    more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    in_order = f"{len(ledger.prompts)} in the order of the data" if ledger.prompts else "not recorded"
    return judge(
        "prompts",
        "; ".join(problems[:_SHOWN]) + more if problems else in_order,
        "a resumed run continued at another data position: was the position, or --data-source-path, changed?",
        fails=bool(problems),
        poor=False,
    )


def _age(ledger: Ledger, fails: bool) -> Finding:
    return judge(
        "samples beyond --max-staleness",
        str(ledger.over_limit),
        "--stale-samples drop, or less over-sampling",
        fails=fails and ledger.over_limit > 0,
        poor=ledger.over_limit > 0,
    )


def _file(ledger: Ledger) -> Finding:
    return judge(
        "events.jsonl",
        f"{ledger.damaged} lines that cannot be read",
        "a killed process cuts at most one line per start",
        fails=False,
        poor=ledger.damaged > ledger.starts,
    )


def _some(groups: list[int]) -> str:
    if not groups:
        return "none"
    more = f" and {len(groups) - _SHOWN} more" if len(groups) > _SHOWN else ""
    return ", ".join(map(str, groups[:_SHOWN])) + more
