"""The targets of step 2, as data, and whether a measured row meets them. Nothing else in the benchmark knows a limit.

Times are multiples of the yardstick of the same run; memory is what a call takes beyond inputs and gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_kernel.benchmarks.problem import LinearCase

LARGE_TOKENS = 4096
SMALL_TOKENS = 1024
FORWARD = 1.10
SMALL = 1.25
ONE_PASS = ((0, None), (512, 1.15), (1536, 1.08), (float("inf"), 1.05))
"""linear_token_loss by workspace in MiB: the limit of the largest entry that is not above the workspace."""
KEPT, RECOMPUTED = 1.08, 1.42
"""linear_logp when all tiles fit, and when none does; in between in proportion to the part that does not fit."""
ENTROPY_ON_TOP = 1.03
COPY_SHARE = 0.85
"""Element-wise operators, as a share of the copy bandwidth of the same run."""
SPEEDUP_WORKSPACE_MIB = 1536
SPEEDUPS = {
    "none": ("native", 1.6),
    "metric": ("native +entropy", 1.75),
    "gradient": ("native +entropy grad", 2.1),
}
"""By what the row does with the entropy: the row to beat, and by how much."""
SLACK_MIB = 1.0
"""Per-token outputs, which belong to neither the workspace nor the gradients."""
VALID = {"log_prob": 0.05, "entropy": 0.1, "d_hidden": 0.05, "d_weight": 0.05, "d_weight_other": 0.1}
"""A row whose error is larger computes something else, and beating it counts for nothing."""


@dataclass(frozen=True)
class Target:
    """At most `limit` times the yardstick, or times the row `base`; at most `mib` of extra memory."""

    limit: float
    mib: float | None = None
    base: str | None = None


def linear_target(
    case: LinearCase, operator: str, phase: str, workspace_mib: float | None, base: str | None
) -> Target | None:
    """The target of one of our rows; None where the issue sets none. `base`: the same row without the entropy."""
    large, small = case.tokens >= LARGE_TOKENS, case.tokens <= SMALL_TOKENS
    if base is not None and (large or small):
        return Target(ENTROPY_ON_TOP, base=base)
    if phase == "forward":
        return Target(FORWARD) if large else None
    assert workspace_mib is not None
    mib = None if workspace_mib == float("inf") else workspace_mib
    if small:
        return Target(SMALL, mib)
    if not large:
        return None
    if operator == "linear_token_loss":
        limit = [limit for least, limit in ONE_PASS if least <= workspace_mib][-1]
        return None if limit is None else Target(limit, mib)
    missing = 1 - min(1.0, workspace_mib / case.logits_mib)
    return Target(KEPT + missing * (RECOMPUTED - KEPT), mib)


def verdict(target: Target, row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> tuple[float, bool] | None:
    """(the number held against `target.limit`, met); None if it could not be measured."""
    if "ratio" not in row:
        return None
    value = row["ratio"]
    if target.base is not None:
        bases = [other["ms"]["median"] for other in rows if other["name"] == target.base and "ms" in other]
        if not bases:
            return None
        value = row["ms"]["median"] / bases[0]
    extra = row.get("extra_mib")
    fits = target.mib is None or extra is None or extra <= target.mib + SLACK_MIB
    return value, value <= target.limit and fits


def is_valid(row: dict[str, Any]) -> bool:
    """Whether all that was checked of a row is finite and within VALID."""
    errors = row.get("errors", {})
    return bool(errors) and all(
        errors.get(name, 0.0) is not None and errors.get(name, 0.0) <= bound for name, bound in VALID.items()
    )


def comparisons(case: LinearCase, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours against the others, forward and backward, for the same use of the entropy and gradients in `.grad`.

    The native path is held against our rows with 1.5 GiB; every other one that is valid, against our fastest row
    that takes no more memory.
    """
    train = [row for row in rows if row["phase"] == "train" and "ms" in row]
    ours = [row for row in train if row["operator"] != "rival" and not row["main_grad"] and is_valid(row)]
    found: list[dict[str, Any]] = []
    for rival in (row for row in train if row["operator"] == "rival"):
        level = [row for row in ours if row["entropy"] == rival["entropy"] and row["upstream"] != "grpo"]
        name, least = SPEEDUPS[rival["entropy"]]
        if rival["name"] == name and case.tokens >= LARGE_TOKENS:
            exact = [row for row in level if row["workspace_mib"] == SPEEDUP_WORKSPACE_MIB]
            found.extend(_against(row, rival, least) for row in exact)
        if not is_valid(rival):
            found.append({"rival": rival["name"], "ours": None, "note": "its results are not valid"})
            continue
        fitting = [row for row in level if _mib(row) <= _mib(rival)]
        if fitting:
            found.append(_against(min(fitting, key=lambda row: row["ms"]["median"]), rival, 1.0))
        else:
            found.append(
                {"rival": rival["name"], "ours": None, "note": "no row of ours takes as little memory"}
            )
    return found


def _mib(row: dict[str, Any]) -> float:
    return row["extra_mib"] if row.get("extra_mib") is not None else 0.0


def _against(ours: dict[str, Any], rival: dict[str, Any], least: float) -> dict[str, Any]:
    speedup = rival["ms"]["median"] / ours["ms"]["median"]
    return {
        "rival": rival["name"],
        "ours": ours["name"],
        "speedup": round(speedup, 4),
        "target": least,
        "met": speedup >= least,
    }
