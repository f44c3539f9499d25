"""Reads the run directories of a benchmark into a switch_bench.record.Record. Starts no runs."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slime.checkpoints.hf_config import read_hf_config
from slime.models import read_decoder
from slime.tracking.environment import ENVIRONMENT_FILE
from slime.tracking.metrics import is_score
from slime.tracking.percentiles import PERCENTILES
from slime.tracking.run_files import is_whole_number, read_object
from slime.tracking.trackers import METRICS_FILE, RESERVED, MetricLines
from switch_bench.planning import UNFINISHED, BenchPlan, Planned, switch_of
from switch_bench.record import SIDES, Record, Repeat
from vime.pool.process import tail
from vime.view.measures import config_flags

COUNTERS = ("rollout/step", "train/step")
FALLBACKS = ("rl_kernel/", "/fallbacks")
NOT_OF_A_TRAINER = (
    *("perf/rollout_time", "perf/update_weights_time"),
    *("rollout/raw_reward", "rollout/response_len/mean"),
)
"""Metrics that are left out of a run on saved rollouts. The two times measure the reading of a file and a transfer
without a receiver. The two values of the rollout come from the file and are equal in every run."""
MADE_FILE = "make_model.json"
"""File in which scripts/make_model.py describes its model."""
SYSTEM_PREFIXES = (Path("/usr"), Path("/usr/local"))
"""Prefixes of a system's Python, which also have other software, such as CUDA."""
SO_FAR = tuple(f"_p{p}" for p in PERCENTILES)
"""Name endings of a run's percentiles over its steps so far. They are left out, as the report computes percentiles."""


@dataclass(frozen=True)
class Steps:
    """The complete steps of a run, and their values that are not finite: (step, metric, "nan" or "inf")."""

    values: list[dict[str, float]]
    broken: list[tuple[int, str, str]]


def read_steps(run_dir: Path, *, trained: bool = True) -> Steps:
    """Returns a mapping per rollout with its metrics, and with means over its optimizer steps (`*_max`: the largest).

    With `trained`, a step is complete if all its optimizer steps are logged; else if its rollout is logged. Values that
    are not finite are left out.
    """
    rollouts: dict[int, dict[str, float]] = {}
    optimizer: dict[int, dict[str, float]] = {}
    broken = []
    told = config_flags(read_saved(run_dir / "config.json")).get("num_steps_per_rollout")
    each = told if is_whole_number(told) and told > 0 else 1
    for line in MetricLines(run_dir / METRICS_FILE):
        if line["step_key"] == "eval/step":
            continue
        of_rollout = line["step_key"] == "rollout/step"
        step = line["step"] if of_rollout else line["step"] // each
        own = (k for k in line if k not in RESERVED and k not in COUNTERS and not k.endswith(SO_FAR))
        values = {k: line[k] for k in own if line[k] is not None}
        (rollouts if of_rollout else optimizer).setdefault(line["step"], {}).update(values)
        broken += [(step, name, word) for name, word in line.get("nonfinite", {}).items()]
    found: list[dict[str, float]] = []
    while (step := len(found)) in rollouts:
        parts = [optimizer.get(step * each + i) for i in range(each)]
        whole = [part for part in parts if part is not None]
        if trained and len(whole) < each:
            break
        found.append({**rollouts[step], **_over_optimizer_steps(whole)})
    return Steps(found, broken)


def _over_optimizer_steps(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    gathered: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            gathered.setdefault(name, []).append(value)
    return {name: max(v) if name.endswith("_max") else math.fsum(v) / len(v) for name, v in gathered.items()}


def read_evaluations(run_dir: Path) -> dict[str, dict[str, float]]:
    """Returns number of trained rollouts, as text -> {evaluation set: mean reward}. Step times have no evaluations."""
    found = dict[str, dict[str, float]]()
    for line in MetricLines(run_dir / METRICS_FILE):
        scores = {name.removeprefix("eval/"): line[name] for name in line if is_score(name, line)}
        if line["step_key"] == "eval/step" and scores:
            known = {name: value for name, value in scores.items() if value is not None}
            found.setdefault(str(line["step"]), {}).update(known)
    return found


def read_saved(path: Path) -> dict[str, Any]:
    """Returns the object in a file of a run, {} if the file does not exist yet. ValueError if it is not JSON."""
    return read_object(path.parent, path.name)


def is_whole(run: Planned, plan: BenchPlan) -> bool:
    """Returns whether a run has all steps, and all files that other runs need."""
    if run.side is None and not all(path.is_file() for path in plan.saved):
        return False
    return len(read_steps(run.run_dir, trained=run.side is not None).values) >= run.steps


def ended_well(run: Planned) -> bool:
    """Returns whether a run's exit status was 0 or is unknown, for example because this process was killed."""
    return not run.status.exists() or run.status.read_text(encoding="utf-8").strip() == "0"


def how_it_ended(run: Planned) -> str:
    """Returns one line with a run's progress and the reason of its end."""
    steps = len(read_steps(run.run_dir, trained=run.side is not None).values)
    if not run.run_dir.exists() and not run.status.exists():
        return f"{run.name} was not started"
    reached = f"after {steps} of {run.steps} steps"
    if not run.status.exists():
        return f"{run.name} was stopped {reached}"
    status = run.status.read_text(encoding="utf-8").strip()
    return f"{run.name} ended with exit status {status} {reached}: {tail(str(run.log), 1)}"


def read_repeat(run: Planned, order: int, root: Path) -> Repeat:
    """Reads a run up to its end; a run without files has no steps."""
    steps = read_steps(run.run_dir).values[: run.steps]
    fallbacks: Counter[str] = Counter()
    start, end = FALLBACKS
    for step in steps:
        for name, value in step.items():
            if name.startswith(start) and name.endswith(end):
                fallbacks[name[len(start) : -len(end)]] += int(value)
    return Repeat(
        order=order,
        run=str(run.run_dir.relative_to(root)),
        finished=len(steps) == run.steps,
        steps=steps,
        config=read_saved(run.run_dir / "config.json"),
        environment=_without_prefix(read_saved(run.run_dir / ENVIRONMENT_FILE)),
        fallbacks={operator: calls for operator, calls in fallbacks.items() if calls},
        evaluations=read_evaluations(run.run_dir),
    )


def _without_prefix(environment: dict[str, Any]) -> dict[str, Any]:
    """Replaces the folder of the Python installation in paths by PREFIX."""
    python = environment.get("python")
    executable = python.get("executable") if isinstance(python, dict) else None
    parents = Path(executable).parents if isinstance(executable, str) else ()
    prefix = parents[1] if len(parents) > 1 else None
    if prefix is None or prefix in SYSTEM_PREFIXES:
        return environment
    escaped = json.dumps(f"{prefix}/")[1:-1]
    found: dict[str, Any] = json.loads(json.dumps(environment).replace(escaped, "PREFIX/"))
    return found


def collect(plan: BenchPlan, command: str) -> Record:
    """Returns the record of a plan's present runs, with remarks about missing runs."""
    sides: dict[str, list[Repeat]] = {side: [] for side in SIDES}
    # A run that was begun anew is later than the plan had it; one that was not begun comes last. The sort is stable.
    as_begun = sorted(plan.runs, key=lambda run: _begun(run.run_dir))
    for run in plan.runs:
        assert run.side is not None
        repeat = read_repeat(run, as_begun.index(run), plan.out)
        if plan.tier == "module":
            steps = [{k: v for k, v in step.items() if k not in NOT_OF_A_TRAINER} for step in repeat.steps]
            repeat = replace(repeat, steps=steps)
        sides[run.side].append(repeat)
    benchmark = plan.benchmark
    return Record(
        tier=plan.tier,
        name=benchmark.name,
        claim=benchmark.claim,
        command=command,
        notes=[*benchmark.notes, *_conditions(plan), *_remarks(plan)],
        switch=switch_of(benchmark.switch, sides),
        warm_up=benchmark.warm_up,
        sides=sides,
        preset=benchmark.preset,
        experts=_experts(plan.model),
    )


def _begun(run_dir: Path) -> str:
    """Returns the start of a run as text that sorts; a run without a start comes last."""
    return str(read_saved(run_dir / ENVIRONMENT_FILE).get("time", "~"))


def _experts(model: Path) -> int:
    """Returns the number of routed experts per layer of the model in a directory, 0 for a dense model."""
    experts = read_decoder(read_hf_config(model)).experts
    return experts.count if experts else 0


def _remarks(plan: BenchPlan) -> Iterator[str]:
    """Yields remarks about the runs that the numbers do not show."""
    for run in plan.all_runs():
        if not is_whole(run, plan) or not ended_well(run):
            yield how_it_ended(run)
        for step, name, word in read_steps(run.run_dir, trained=run.side is not None).broken:
            yield f"{run.name}: {name} was {word} in step {step}"
    runs = plan.out / "runs"
    for path in sorted((runs / UNFINISHED).glob("*/")):
        yield f"{path.relative_to(plan.out)} is an attempt that did not finish and was begun anew"
    known = {run.run_dir for run in plan.all_runs()} | {runs / UNFINISHED}
    for path in sorted(runs.glob("*/")):
        if path not in known:
            yield f"{path.relative_to(plan.out)} is of a call with more repeats and is left out"


def _conditions(plan: BenchPlan) -> list[str]:
    """Returns the conditions that a reader of the numbers needs."""
    found = []
    made = read_saved(plan.model / MADE_FILE)
    if made.get("weights") == "random":
        found.append(
            f"random weights of the shape of {made['arch']}: speed and numbers, not what a model can learn"
        )
    if made and made["layers"] < made["of"]:
        found.append(
            f"reduced depth: {made['layers']} of the {made['of']} layers, every other dimension is true"
        )
    if plan.tier == "module":
        count = plan.benchmark.steps
        found.append(
            f"trainer alone, on {count} saved rollouts that are the same for every run: drawn by the model before its "
            "first step, so that later steps are as far off policy as they have moved away from it"
        )
    return found
