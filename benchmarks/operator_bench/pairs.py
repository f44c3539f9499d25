"""Pairs rows of rl_kernel with rows of other implementations, and computes the ratios of their times.

The implementations took turns in one process: the k-th calls of two implementations belong to round k.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

Row = Mapping[str, Any]
LEVEL = 0.95
VALID = {"log_prob": 0.05, "entropy": 0.1, "d_hidden": 0.05, "d_weight": 0.05, "d_weight_other": 0.1}
"""Largest allowed errors of a row. The time of a row with a larger error is not compared."""
DEFAULT_WORKSPACE_MIB = 1536
"""The default of --rl-kernel-workspace-mib."""
NO_KERNEL = "none: rl_kernel ran no kernel"
NO_CALLS = "none: ranges overlap, and single calls were not kept"


@dataclass(frozen=True)
class Ratio:
    """Our time divided by the rival's: the median over `rounds`, and its interval at LEVEL (None with too few
    rounds)."""

    value: float
    rounds: int
    low: float | None = None
    high: float | None = None

    @property
    def words(self) -> str:
        """Returns "faster", "slower", or the largest difference that is still possible."""
        if self.low is None or self.high is None:
            return f"none: {self.rounds} rounds are too few"
        if self.high < 1:
            return "faster"
        if self.low > 1:
            return "slower"
        within = 100 * max(abs(self.low - 1), abs(self.high - 1))
        return f"no difference shown (within {within:.{1 if within >= 1 else 2}f} %)" if within else "equal"


def median_ratio(ours: Sequence[float], others: Sequence[float]) -> Ratio | None:
    """Returns median(ours / others) over the rounds that both made; None without such a round.

    The interval comes from the sign test, between two of the sorted ratios (`sign_rank`). It assumes no distribution,
    so one delayed call moves it by at most one rank. It assumes independent rounds. With correlated noise (a
    correlation of 0.6 from round to round), simulations call 13 to 22 % of equal pairs different, instead of 1 to 3 %.
    """
    ratios = sorted(a / b for a, b in zip(ours, others, strict=False))
    if not ratios:
        return None
    rank = sign_rank(len(ratios))
    ends = () if rank is None else (ratios[rank - 1], ratios[-rank])
    return Ratio(statistics.median(ratios), len(ratios), *ends)


@cache
def sign_rank(rounds: int) -> int | None:
    """Returns the largest k for which the k-th smallest and the k-th largest value contain the median at LEVEL.

    The median is below the k-th smallest value if fewer than k values are below it: P(Binomial(rounds, 1/2) < k). None
    with fewer than 6 values.
    """
    below, rank = 0.0, None
    for k in range(1, rounds // 2 + 1):
        below += math.comb(rounds, k - 1) / 2**rounds
        if 2 * below > 1 - LEVEL:
            break
        rank = k
    return rank


@dataclass(frozen=True)
class Pair:
    """A row of rl_kernel and the row of another implementation that does the same work."""

    ours: Row
    rival: Row

    @property
    def ratio(self) -> Ratio:
        """Ratio of the two rows. If the record has no single calls, it is the ratio of the medians without an
        interval."""
        ours, rival = self.ours["ms"], self.rival["ms"]
        found = median_ratio(ours.get("each", ()), rival.get("each", ()))
        return found or Ratio(ours["median"] / rival["median"], min(ours["calls"], rival["calls"]))

    @property
    def words(self) -> str:
        """Returns the verdict, or "none" with the reason."""
        ours, rival, ratio = self.ours["ms"], self.rival["ms"], self.ratio
        if not ran_kernel(self.ours):
            return NO_KERNEL
        if sign_rank(ratio.rounds) is None or ratio.low is not None:
            return ratio.words
        if ours["max"] < rival["min"]:  # Then all rounds agree.
            return "faster"
        return "slower" if ours["min"] > rival["max"] else NO_CALLS


def ran_kernel(row: Row) -> bool:
    """Returns whether the operator ran its kernels. Old records of operators that move bytes always used kernels."""
    found = row.get("implementation")
    return not row.get("fallbacks") and (found is None or found.get(row["operator"]) == "triton")


def linear_pairs(rows: Sequence[Row]) -> tuple[list[Pair], list[tuple[str, str]]]:
    """Returns (pairs of a case of the linear operators, [(row that is not compared, reason)])."""
    ours, rivals, unmatched = _parted(rows)
    pairs = []
    for operator, main_grad in dict.fromkeys((row["operator"], row["main_grad"]) for row in ours):
        form = [row for row in ours if (row["operator"], row["main_grad"]) == (operator, main_grad)]
        for rival in (row for row in rivals if row.get("against", operator) == operator):
            if (row := _same_work(form, rival)) is not None:
                pairs.append(Pair(row, rival))
    matched = {pair.rival["name"] for pair in pairs}
    lonely = [row["name"] for row in rivals if row["name"] not in matched]
    return pairs, [*unmatched, *((name, "no row of rl_kernel did the same") for name in lonely)]


def loss_pairs(rows: Sequence[Row]) -> list[Pair]:
    """Pairs each additional loss of linear_token_loss with grpo_loss in the same workspace."""
    fit = [row for row in rows if row["operator"] == "linear_token_loss" and not unfit(row)]
    base = next((row for row in fit if row["upstream"] == "grpo"), None)
    others = (row for row in fit if row["upstream"] not in ("plain", "entropy", "grpo"))
    return [] if base is None else [Pair(row, base) for row in others]


def stream_pairs(rows: Sequence[Row]) -> tuple[list[Pair], list[tuple[str, str]]]:
    """Returns the same for operators that move bytes. Their rivals name the row for the comparison."""
    ours, rivals, unmatched = _parted(rows)
    by_name = {row["name"]: row for row in ours}
    return [Pair(by_name[row["against"]], row) for row in rivals if row["against"] in by_name], unmatched


def _parted(rows: Sequence[Row]) -> tuple[list[Row], list[Row], list[tuple[str, str]]]:
    """Returns (rows of rl_kernel, rows of other implementations, [(row that is not compared, reason)])."""
    unmatched = [(row["name"], why) for row in rows if (why := unfit(row))]
    fit = [row for row in rows if not unfit(row)]
    ours = [row for row in fit if row["operator"] != "rival"]
    return ours, [row for row in fit if row["operator"] == "rival"], unmatched


def unfit(row: Row) -> str | None:
    """Returns the reason why a row is not compared: it failed, or its results are wrong. None if it is compared.

    A row of a linear operator has `errors`, by name; a row of an operator that moves bytes has one `error`.
    """
    if "skipped" in row:
        return str(row["skipped"])
    if "error" in row:
        return "its results are not finite" if row["error"] is None else None
    errors = row.get("errors", {})
    wrong = [
        f"{name} {'not finite' if error is None else format(error, '.2g')}, allowed {bound:g}"
        for name, bound in VALID.items()
        if name in errors and ((error := errors[name]) is None or error > bound)
    ]
    if wrong:
        return f"its results are off: {'; '.join(wrong)}"
    return None if errors else "nothing of its results was checked"


def _same_work(ours: Sequence[Row], rival: Row) -> Row | None:
    """Returns our row with the same phase, the same use of the entropy and logits rounded to bfloat16, in the default
    workspace or else in the largest measured workspace.

    The choice never depends on the time, because the best of several rows would beat an equal rival by chance.
    """
    level = [
        row
        for row in ours
        if (row["phase"], row["entropy"]) == (rival["phase"], rival["entropy"])
        and row["upstream"] in ("plain", "entropy")
        and " fp32" not in row["name"]
    ]
    return max(level, key=_preference, default=None)


def _preference(row: Row) -> tuple[bool, float]:
    mib = row["workspace_mib"]
    size = 0.0 if mib is None else float("inf") if mib == "unlimited" else float(mib)
    return size == DEFAULT_WORKSPACE_MIB, size


def all_rows(results: Mapping[str, Any]) -> Iterator[Row]:
    for result in results["linear"]:
        yield from result["rows"]
    yield from (results["elementwise"] or {"rows": []})["rows"]


def check(results: object, path: object) -> None:
    """Raises a ValueError for a file that is not a result of operator_bench. It names the file and the fault."""
    if not isinstance(results, dict) or results.get("schema") != 1:
        raise ValueError(f"{path} must be of schema 1; measure again with this version")
    if missing := {"machine", "linear", "elementwise"} - results.keys():
        raise ValueError(f"{path} must say {', '.join(sorted(missing))}, got none; measure again")
    for row in all_rows(results):
        name, ms = row.get("name", "a row without a name"), row.get("ms")
        if ms is None and "skipped" not in row:
            raise ValueError(f"{path}: {name} must have a time or say why it has none; measure again")
        times = [] if ms is None else [ms.get("median"), ms.get("min"), ms.get("max"), *ms.get("each", [])]
        if bad := [each for each in times if not isinstance(each, int | float) or not each > 0]:
            raise ValueError(f"{path}: {name}: times must be numbers > 0, got {bad}; measure again")
