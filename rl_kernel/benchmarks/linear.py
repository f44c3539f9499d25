"""One case of the linear operators: check every contender against the truth, then time all of them in turns."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_kernel.benchmarks.contender import Contender, what_ran
from rl_kernel.benchmarks.problem import Problem
from rl_kernel.benchmarks.timing import (
    Clock,
    Samples,
    Step,
    Timings,
    calls_within,
    clock_of,
    heat,
    probe,
    reason_of,
    take_turns,
)
from rl_kernel.ops.linear_logp.cases import Case

BUDGET_MS = 1500.0
"""Timed milliseconds a contender may use in one case; slower ones take part in fewer rounds."""


@dataclass(frozen=True)
class Plan:
    """How thoroughly to measure."""

    rounds: int
    heat_s: float


def run_case(case: Case, contenders: Sequence[Contender], device: torch.device, plan: Plan) -> dict[str, Any]:
    """The result of one case as plain data: the yardstick, and one row per contender."""
    start = time.perf_counter()
    clock = clock_of(device)
    problem = Problem(case, device)
    problem.product()
    steps: dict[str, Step] = {}
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, int] = {}
    for contender in contenders:
        row = rows[contender.name] = _facts(contender)
        try:
            steps[contender.name] = contender.build(problem)
            one_call_ms = _first_calls(contender, steps[contender.name], problem, clock, row)
            calls[contender.name] = calls_within(BUDGET_MS, one_call_ms, plan.rounds)
        except Exception as error:  # border: a contender that cannot run is a row with the reason
            row["skipped"] = reason_of(error)
            steps.pop(contender.name, None)
            if device.type == "cuda":
                torch.cuda.empty_cache()
        problem.clear()
    checked = time.perf_counter()
    heat(problem.product, clock, plan.heat_s)
    timings = take_turns(
        problem.product, steps, rounds=plan.rounds, clock=clock, reset=problem.clear, calls=calls
    )
    result = _result(case, contenders, rows, timings)
    result["seconds"] = {
        "checks": round(checked - start, 1),
        "timing": round(time.perf_counter() - checked, 1),
    }
    return result


def _facts(contender: Contender) -> dict[str, Any]:
    mib = contender.workspace_mib
    facts = {
        "name": contender.name,
        "operator": contender.operator,
        "phase": contender.phase,
        "entropy": contender.entropy,
        "upstream": contender.upstream,
        "main_grad": contender.main_grad,
        "workspace_mib": "unlimited" if mib == float("inf") else mib,
    }
    return facts | ({"against": contender.against} if contender.against else {})


def _first_calls(
    contender: Contender, step: Step, problem: Problem, clock: Clock, row: dict[str, Any]
) -> float:
    """A checked call (which also compiles), then one whose memory and time are read; returns its milliseconds."""
    held = allocated(problem.device)
    problem.clear()
    if contender.main_grad:
        problem.main_grad.zero_()
    what_ran()
    outputs = step()
    clock.finish()
    row |= what_ran()
    train = contender.phase == "train"
    d_weight = problem.main_grad if contender.main_grad else problem.weight.grad
    row["errors"] = problem.truth.errors(outputs, contender.upstream if train else None, d_weight)
    del outputs, d_weight
    problem.clear()
    retained = (allocated(problem.device) - held) / 2**20
    if retained >= 1:
        row["retained_mib"] = round(retained, 1)

    def gradients() -> list[Tensor | None]:
        return [leaf.grad for leaf in problem.leaves]

    one_call_ms, extra_mib = probe(step, clock, gradients)
    if extra_mib is not None:
        row["extra_mib"] = round(extra_mib, 1)
    return one_call_ms


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _result(
    case: Case, contenders: Sequence[Contender], rows: dict[str, dict[str, Any]], timings: Timings
) -> dict[str, Any]:
    product_ms = timings.yardstick.median
    for contender in contenders:
        row = rows[contender.name]
        if contender.name in timings.failed:
            row["skipped"] = timings.failed[contender.name]
        if contender.name in timings.contenders:
            row |= timed(timings.contenders[contender.name], contender.products, product_ms)
    return {
        "case": {"name": case.name, "tokens": case.tokens, "hidden": case.hidden, "vocab": case.vocab},
        "product_ms": timings.yardstick.as_json(),
        "product_tflops": round(2 * case.tokens * case.hidden * case.vocab / product_ms / 1e9, 1),
        "floor_ms": round(3 * product_ms, 5),
        "rows": list(rows.values()),
    }


def timed(samples: Samples, products: int, product_ms: float) -> dict[str, Any]:
    """Time of a row, and as a multiple of `products` matrix products: median, least, largest."""
    ratio, least, largest = samples.over(products * product_ms)
    return {
        "ms": samples.each_as_json(),
        "products": products,
        "ratio": round(ratio, 4),
        "ratio_min": round(least, 4),
        "ratio_max": round(largest, 4),
    }


def build_steps(
    case: Case, contenders: Sequence[Contender], device: torch.device
) -> dict[str, Callable[[], Any]]:
    """Calls for the profiler, each with the old gradients dropped first."""
    problem = Problem(case, device)
    steps: dict[str, Callable[[], Any]] = {}
    for contender in contenders:
        try:
            steps[contender.name] = _clean(problem, contender.build(problem))
        except ImportError as error:
            print(f"{case.name}: {contender.name}: {reason_of(error)}", file=sys.stderr, flush=True)
    return steps


def _clean(problem: Problem, step: Step) -> Step:
    def call() -> Any:
        problem.clear()
        return step()

    return call
