"""operators.json of `vime bench op` (rl_kernel.bench): which of its rows stand beside each other, and what may be said.

Owns the matching of contenders with rl_kernel and the words for a ratio; what a page shows of it is the business of
vime.bench.operator_tables. Contenders took turns in one process: call k of one and call k of the other are of round k.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_kernel.benchmarks.targets import VALID, is_valid
from vime.bench.statistics import Difference, median_ratio, sign_rank
from vime.bench.verdicts import Metric, verdict

OPERATORS_FILE = "operators.json"
SCHEMA = 1
CALL = Metric("call", "time of a call", "s", False)
DEFAULT_WORKSPACE_MIB = 1536
"""Of a run that says nothing else (--rl-kernel-workspace-mib)."""
NO_KERNEL = "none: rl_kernel ran no kernel"
NO_CALLS = "none: ranges overlap, and single calls were not kept"


@dataclass(frozen=True)
class Match:
    """A contender beside the row of one operator of rl_kernel that computes the same."""

    operator: str
    ours: dict[str, Any]
    rival: dict[str, Any]

    @property
    def ratio(self) -> Difference | None:
        """Our time by the contender's, less 1, with its interval; None of a file that keeps medians alone."""
        if "each" not in self.ours["ms"] or "each" not in self.rival["ms"]:
            return None
        return median_ratio(np.array(self.rival["ms"]["each"]), np.array(self.ours["ms"]["each"]))

    @property
    def value(self) -> float:
        """Our time by the contender's: the median over rounds, without single calls that of the medians."""
        ratio = self.ratio
        return self.ours["ms"]["median"] / self.rival["ms"]["median"] if ratio is None else 1 + ratio.value

    @property
    def rounds(self) -> int:
        ratio = self.ratio
        return min(self.ours["ms"]["calls"], self.rival["ms"]["calls"]) if ratio is None else ratio.steps

    @property
    def too_few(self) -> bool:
        """Whether no interval at LEVEL exists for so few rounds."""
        return sign_rank(self.rounds) is None

    @property
    def words(self) -> str:
        """faster, slower, no difference shown; or "none" with the reason why nothing can be said."""
        if not ran_kernel(self.ours):
            return NO_KERNEL
        if self.too_few:
            return f"none: {self.rounds} rounds are too few"
        return self._of_ranges() if (ratio := self.ratio) is None else verdict(CALL, ratio)

    def _of_ranges(self) -> str:
        """Where every call of one took less than every call of the other, so did it in every round."""
        ours, rival = self.ours["ms"], self.rival["ms"]
        if ours["max"] < rival["min"]:
            return "faster"
        return "slower" if ours["min"] > rival["max"] else NO_CALLS


@dataclass(frozen=True)
class Case:
    """One shape, or the operators that move bytes. `unmatched`: (row, why it stands beside nothing).

    `floor_ms`: what no implementation of forward and backward can beat; None where there is no such bound.
    """

    name: str
    shape: str
    matches: list[Match]
    unmatched: list[tuple[str, str]]
    floor_ms: float | None = None


def short_name(row: Mapping[str, Any]) -> str:
    """Of a rival that stands beside one row alone, what sets it apart: "reference", "compile"."""
    return row["name"].removeprefix(f"{row.get('against')}: ")


def has_operators(directory: Path) -> bool:
    return (directory / OPERATORS_FILE).is_file()


def read_operators(directory: Path) -> dict[str, Any]:
    """The results in `directory`. ValueError when they are not of rl_kernel.bench."""
    path = directory / OPERATORS_FILE
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} must be JSON, got {error}; measure again") from error
    check(content, path)
    return content


def check(content: Any, path: Path | str) -> None:
    """ValueError for results that no page could show, naming the file and what is wrong with it."""
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"{path} must be of schema {SCHEMA}; measure again with this version")
    if missing := {"machine", "linear", "elementwise"} - content.keys():
        raise ValueError(f"{path} must say {', '.join(sorted(missing))}, got none; measure again")
    for row in all_rows(content):
        name, ms = row.get("name", "a row without a name"), row.get("ms")
        if ms is None and "skipped" not in row:
            raise ValueError(f"{path}: {name} must have a time or say why it has none; measure again")
        times = [] if ms is None else [ms.get("median"), ms.get("min"), ms.get("max"), *ms.get("each", [])]
        if bad := [each for each in times if not isinstance(each, int | float) or not each > 0]:
            raise ValueError(f"{path}: {name}: times must be numbers > 0, got {bad}; measure again")


def all_rows(content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for result in content["linear"]:
        yield from result["rows"]
    yield from (content["elementwise"] or {"rows": []})["rows"]


def ran_kernel(row: Mapping[str, Any]) -> bool:
    """Whether the operator of a row ran its kernels. Old rows of operators that move bytes do not say: they did, as
    they stand beside no contender."""
    found = row.get("implementation")
    return not row.get("fallbacks") and (found is None or found.get(row["operator"]) == "triton")


def cases_of(content: Mapping[str, Any]) -> list[Case]:
    """What can be held against each other, case by case; rows that failed or are not valid with the reason."""
    found = [_linear_case(result) for result in content["linear"]]
    if content["elementwise"]:
        found.append(_stream_case(content["elementwise"]["rows"]))
    return found


def _linear_case(result: Mapping[str, Any]) -> Case:
    case = result["case"]
    shape = f"{case['tokens']:,} tokens, hidden {case['hidden']:,}, vocabulary {case['vocab']:,}"
    ours, rivals = _parted(result["rows"])
    unmatched = [(row["name"], why) for row in [*ours, *rivals] if (why := _unfit(row))]
    matches = []
    for operator, main_grad in dict.fromkeys((row["operator"], row["main_grad"]) for row in ours):
        form = operator, main_grad
        of_it = [row for row in ours if (row["operator"], row["main_grad"]) == form and not _unfit(row)]
        for rival in (row for row in rivals if row.get("against", operator) == operator and not _unfit(row)):
            if (row := _same_work(of_it, rival)) is not None:
                matches.append(Match(operator, row, rival))
    beside = {match.rival["name"] for match in matches} | {name for name, _ in unmatched}
    unmatched += [
        (row["name"], "no row of rl_kernel did the same") for row in rivals if row["name"] not in beside
    ]
    return Case(case["name"], shape, matches, unmatched, result["floor_ms"])


def _stream_case(rows: Sequence[dict[str, Any]]) -> Case:
    ours, rivals = _parted(rows)
    unmatched = [(row["name"], why) for row in rows if (why := _without_numbers(row))]
    by_name = {row["name"]: row for row in ours if not _without_numbers(row)}
    matches = [
        Match(by_name[rival["against"]]["operator"], by_name[rival["against"]], rival)
        for rival in rivals
        if rival["against"] in by_name and not _without_numbers(rival)
    ]
    return Case("bytes", "operators that move bytes", matches, unmatched)


def _parted(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows of rl_kernel, rows of the contenders)."""
    ours = [row for row in rows if row["operator"] != "rival"]
    return ours, [row for row in rows if row["operator"] == "rival"]


def _unfit(row: Mapping[str, Any]) -> str | None:
    """Why a row is held against nothing: it failed, or it computes something else."""
    if "skipped" in row:
        return row["skipped"]
    if is_valid(row):
        return None
    errors = row.get("errors", {})
    off = [
        f"{name} {'not finite' if errors[name] is None else format(errors[name], '.2g')}, allowed {bound:g}"
        for name, bound in VALID.items()
        if name in errors and (errors[name] is None or errors[name] > bound)
    ]
    return f"its results are off: {'; '.join(off)}" if off else "nothing of its results was checked"


def _without_numbers(row: Mapping[str, Any]) -> str | None:
    """Why a row of an operator that moves bytes is held against nothing."""
    return row.get("skipped") or ("its results are not finite" if row.get("error", 0.0) is None else None)


def _same_work(ours: Sequence[dict[str, Any]], rival: Mapping[str, Any]) -> dict[str, Any] | None:
    """Our row with the same phase and use of the entropy, its logits rounded to bfloat16, in the workspace that a run
    has by default, or else in the largest that was measured.

    The row is picked by what it was asked to do, never by how fast it was: the best of several rows beats an equal
    contender by luck, and no interval knows.
    """
    level = [
        row
        for row in ours
        if (row["phase"], row["entropy"]) == (rival["phase"], rival["entropy"])
        and row["upstream"] != "grpo"
        and " fp32" not in row["name"]
    ]
    return max(level, key=_preference, default=None)


def _preference(row: Mapping[str, Any]) -> tuple[bool, float]:
    mib = row["workspace_mib"]
    size = 0.0 if mib is None else float("inf") if mib == "unlimited" else float(mib)
    return size == DEFAULT_WORKSPACE_MIB, size
