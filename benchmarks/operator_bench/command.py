"""`vime bench op [OP ...]` measures time, memory and error of the operators against a floor of the same
run.

On a GPU it measures. On a CPU the same code runs on tiny shapes, which shows only that it works. This module owns the
command line; `operator_bench` owns the measurements.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from operator_bench import report
from operator_bench.elementwise import run_elementwise
from operator_bench.linear import run_case
from operator_bench.machine import describe, gpu_facts
from operator_bench.own import own_contenders
from operator_bench.problem import Contender, MakeLoss, Problem, select_cases
from operator_bench.rivals import RIVALS, rival_contenders, rival_families
from operator_bench.streams import STREAMS
from operator_bench.timing import LEAST_CALLS, Plan, reason_of, trace
from rl_kernel.checks import invalid
from rl_kernel.host import Facts
from rl_kernel.ops.linear_logp.cases import LinearCase

LINEAR = ("linear_logp", "linear_token_loss")
OPERATORS = (*LINEAR, *STREAMS)
SCHEMA = 1
FULL, QUICK, HOST = Plan(11, 1.0), Plan(7, 0.7), Plan(LEAST_CALLS, 0.0)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="vime bench op", description=__doc__)
    found.add_argument("operators", nargs="*", metavar="OP", help=f"of {', '.join(OPERATORS)} (default: all)")
    found.add_argument("--cases", metavar="NAME,..", help="shapes of the linear operators (default: all)")
    found.add_argument("--out", type=Path, metavar="FILE.json", help="write the results here, case by case")
    found.add_argument("--workspace", metavar="MiB,..", help="workspaces to try, in MiB or 'unlimited'")
    found.add_argument("--quick", action="store_true", help="fewer rounds; no rivals unless named")
    found.add_argument(
        "--rivals", metavar="NAME,..", help=f"all, none, or of {', '.join(RIVALS)} (on a CPU: none)"
    )
    found.add_argument(
        "--losses",
        metavar="MODULE:NAME",
        help="further losses to time in linear_token_loss beside grpo_loss: a dict, name -> "
        "make(old_log_probs, advantages, mask, denominator) -> loss(log_probs, rows) -> (loss, metrics)",
    )
    found.add_argument("--rows", metavar="TEXT,..", help="only rows whose name contains one of these")
    found.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    found.add_argument(
        "--trace", action="store_true", help="print the top kernels of one call a row, time nothing"
    )
    found.add_argument("--commit", help="name the commit where the files came without their history")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    command = list(sys.argv[1:] if argv is None else argv)
    arguments = parser().parse_args(command)
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    only = arguments.rows.split(",") if arguments.rows else []
    try:
        operators = check_operators(arguments.operators)
        cases = select_cases(arguments.cases, device)
        contenders = select_contenders(operators, arguments, device, only)
    except ValueError as error:
        parser().error(str(error))
    plan = (QUICK if arguments.quick else FULL) if device.type == "cuda" else HOST
    if arguments.trace:
        print_traces(cases, contenders, device)
        return 0
    machine = describe(device, ["-m", "vime", "bench", "op", *command], arguments.commit)
    results: Facts = {"schema": SCHEMA, "machine": machine}
    results |= {"rounds": plan.rounds, "linear": [], "elementwise": None}
    print("\n".join(report.machine_lines(machine)), flush=True)
    for case in cases if contenders else []:
        results["linear"].append(run_case(case, contenders, device, plan))
        print("\n" + "\n".join(report.linear_lines(results["linear"][-1])), flush=True)
        write(arguments.out, results)
        release(device)
    streams = [name for name in operators if name in STREAMS]
    if streams:
        families = rival_families(arguments.rivals or default_rivals(arguments, device))
        results["elementwise"] = run_elementwise(streams, device, plan, only, families)
        print("\n" + "\n".join(report.stream_lines(results["elementwise"])), flush=True)
    if device.type == "cuda":
        results["machine"]["gpu_facts_after"] = gpu_facts()
    write(arguments.out, results)
    print("\n" + "\n".join(report.fallback_lines(results)))
    return 0


def check_operators(names: Sequence[str]) -> list[str]:
    """Returns the operators to run, in the standard order."""
    for name in names:
        if name not in OPERATORS:
            raise invalid("OP", f"be one of {', '.join(OPERATORS)}", repr(name), "check the spelling")
    return [name for name in OPERATORS if not names or name in names]


def parse_workspaces(text: str | None) -> list[float] | None:
    """Returns the workspaces in MiB; `unlimited` becomes infinity."""
    if text is None:
        return None
    found = []
    for part in text.split(","):
        try:
            value = float("inf") if part == "unlimited" else float(part)
        except ValueError:
            value = 0.0
        if not value > 0:
            raise invalid(
                "--workspace", "list numbers of MiB > 0, or unlimited", repr(part), "try 512,unlimited"
            )
        found.append(value)
    return found


def select_contenders(
    operators: Sequence[str], arguments: argparse.Namespace, device: torch.device, only: Sequence[str]
) -> list[Contender]:
    """Returns the rows of the linear operators and of their rivals, or [] if no linear operator is selected."""
    linear = [name for name in operators if name in LINEAR]
    if not linear:
        return []
    rivals = rival_contenders(arguments.rivals or default_rivals(arguments, device))
    losses = load_losses(arguments.losses)
    rows = own_contenders(linear, parse_workspaces(arguments.workspace), losses) + rivals
    return [row for row in rows if not only or any(part in row.name for part in only)]


def load_losses(path: str | None) -> dict[str, MakeLoss]:
    """Returns the dict that --losses names."""
    if path is None:
        return {}
    module, _, name = path.partition(":")
    try:
        losses = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise invalid("--losses", "be MODULE:NAME", repr(path), f"check it: {error}") from error
    if not isinstance(losses, dict):
        raise invalid("--losses", "name a dict", type(losses).__name__, "its values make a loss each")
    return losses


def default_rivals(arguments: argparse.Namespace, device: torch.device) -> str:
    few = arguments.quick or arguments.trace or device.type == "cpu"
    return "none" if few else "all"


def print_traces(cases: Sequence[LinearCase], contenders: Sequence[Contender], device: torch.device) -> None:
    for case in cases:
        problem = Problem(case, device)
        for contender in contenders:
            name = f"{case.name}: {contender.name}"
            problem.clear()
            try:
                text = report.trace_text(name, *trace(contender.build(problem), device, problem.clear))
            except Exception as error:  # border: a library that is missing or a call that fails is a line
                text = f"{name}: {reason_of(error)}"
            print("\n" + text, flush=True)
        del problem
        release(device)


def release(device: torch.device) -> None:
    """Frees the memory of a case. A problem and its truth reference each other, so only the garbage collector frees
    them."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def write(path: Path | None, results: Facts) -> None:
    """Writes `results` as standard JSON. The caller has already replaced every number that is not finite with null."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(results, indent=1, allow_nan=False) + "\n"
        # Put the calls of a row on one line. Strings hold no line breaks, so the pattern matches lists of numbers only.
        path.write_text(
            re.sub(r"\[\n[-+\d.e,\s]+\]", lambda found: " ".join(found[0].split()), text), encoding="utf-8"
        )


if __name__ == "__main__":
    sys.exit(main())
