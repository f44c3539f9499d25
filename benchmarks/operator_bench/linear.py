"""Measures one case of the linear operators: the reference product, and a row per contender."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from operator_bench.problem import Contender, Outputs, Problem
from operator_bench.timing import CallTimes, Entry, Plan, Step, measure
from rl_kernel.host import Facts
from rl_kernel.ops.linear_logp.cases import LinearCase


def run_case(case: LinearCase, contenders: Sequence[Contender], device: torch.device, plan: Plan) -> Facts:
    """Returns the result of a case as plain data: the reference product, and one row per contender."""
    problem = Problem(case, device)
    problem.product()
    entries = [_entry(contender, problem) for contender in contenders]
    timings = measure(entries, problem.product, device, plan, problem.clear)
    product_ms = timings.yardstick.median
    for contender, entry in zip(contenders, entries, strict=True):
        if contender.name in timings.contenders:
            entry.row.update(timed(timings.contenders[contender.name], contender.products, product_ms))
    return {
        "case": {"name": case.name, "tokens": case.tokens, "hidden": case.hidden, "vocab": case.vocab},
        "product_ms": timings.yardstick.as_json(),
        "product_tflops": round(2 * case.tokens * case.hidden * case.vocab / product_ms / 1e9, 1),
        "floor_ms": round(3 * product_ms, 5),
        "rows": [entry.row for entry in entries],
    }


def _entry(contender: Contender, problem: Problem) -> Entry:
    mib = contender.workspace_mib
    row = {
        "name": contender.name,
        "operator": contender.operator,
        "phase": contender.phase,
        "entropy": contender.entropy,
        "upstream": contender.upstream,
        "main_grad": contender.main_grad,
        "workspace_mib": "unlimited" if mib == float("inf") else mib,
    }
    if contender.make_loss is not None:
        problem.add_loss(contender.upstream, contender.make_loss)
    row |= {"against": contender.against} if contender.against else {}

    def build() -> Step:
        if contender.main_grad:
            problem.main_grad.zero_()
        return contender.build(problem)

    def errors(outputs: Outputs) -> Facts:
        upstream = contender.upstream if contender.phase == "train" else None
        d_weight = problem.main_grad if contender.main_grad else problem.weight.grad
        return {"errors": problem.truth.errors(outputs, upstream, d_weight)}

    return Entry(row, build, errors, lambda outputs: [leaf.grad for leaf in problem.leaves])


def timed(samples: CallTimes, products: int, product_ms: float) -> Facts:
    """Returns a row's time, also as a multiple of `products` matrix products: median, smallest, largest."""
    floor_ms = products * product_ms
    return {
        "ms": samples.each_as_json(),
        "products": products,
        "ratio": round(samples.median / floor_ms, 4),
        "ratio_min": round(min(samples.ms) / floor_ms, 4),
        "ratio_max": round(max(samples.ms) / floor_ms, 4),
    }
