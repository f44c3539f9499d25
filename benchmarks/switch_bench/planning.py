"""Plans the command lines of `vime train` for a benchmark of whole runs, and their order. Starts nothing.

OUT/model-ARCH                        random weights, if the file names an architecture
OUT/runs/rollouts, OUT/rollouts/      module: one run that generates only, and the samples it saves
OUT/runs/baseline-0, rl_kernel-0, baseline-1, ...     the sides in turn

Repeat i of whole steps has separate seeds, which are equal on both sides. Runs with the same seed would be the same
sample of rollouts and learning. A module's repeats train on the same rollouts, so they repeat only the times.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from slime.config.config_file import split_argv
from slime.config.fields import spelled
from slime.config.secrets import mask_command
from slime.data.files import prompt_files
from slime.rules.flags import own_flags
from slime.tracking.environment import collect_environment
from switch_bench.compare import PER_PAIR, refuse_unlike
from switch_bench.record import BASELINE, SIDES, Repeat, Switch
from switch_bench.settings import ARITHMETIC, Benchmark, tokens
from vime.backends import parse_config
from vime.pool.engine_server import pair_up
from vime.view.measures import config_flags

ENTRY = (sys.executable, "-m", "vime", "train")
ROOT = Path(__file__).resolve().parents[2]
MAKE_MODEL = ROOT / "scripts" / "make_model.py"
SAVED = "{rollout_id}.pt"
UNFINISHED = "unfinished"
"""Folder of unfinished runs that were started again."""


@dataclass(frozen=True)
class Planned:
    """One run of `vime train` with the flags `argv`. `side` is None for the run that makes a module's rollouts."""

    name: str
    side: str | None
    run_dir: Path
    steps: int
    argv: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        return [*ENTRY, *self.argv]

    @property
    def log(self) -> Path:
        """File for its standard output and error."""
        return self.run_dir.with_name(f"{self.name}.log")

    @property
    def status(self) -> Path:
        """File for its exit status, written after its end."""
        return self.run_dir.with_name(f"{self.name}.status")


@dataclass(frozen=True)
class BenchPlan:
    """A tier of a benchmark in the directory `out`. `runs` are in the order of their starts."""

    tier: str
    benchmark: Benchmark
    out: Path
    model: Path
    data: str
    rollouts: Planned | None
    runs: tuple[Planned, ...]

    @property
    def model_command(self) -> list[str] | None:
        """Command that makes the model; None if the user has named a model."""
        model = self.benchmark.model
        if model.arch is None:
            return None
        if not MAKE_MODEL.is_file():
            raise ValueError(
                f"model.arch must be used in a checkout of vime, whose {MAKE_MODEL.name} makes the model, got "
                f"{model.arch} and a wheel; give model.path, the folder of a model"
            )
        depth = [] if model.layers is None else ["--layers", str(model.layers)]
        data = ["--arithmetic"] if self.benchmark.data == ARITHMETIC else []
        made = ["--arch", model.arch, *depth, *data]
        return [sys.executable, str(MAKE_MODEL), *made, "--random", str(self.model)]

    @property
    def python_path(self) -> str:
        """PYTHONPATH of every command: this package, and the folder of the file with its hooks."""
        here = [str(ROOT), str(self.benchmark.file.absolute().parent)]
        return os.pathsep.join([*here, *filter(None, [os.environ.get("PYTHONPATH")])])

    @property
    def saved(self) -> list[Path]:
        """Files of the rollouts for a module's training."""
        return [self.out / "rollouts" / SAVED.format(rollout_id=i) for i in range(self.benchmark.steps)]

    def all_runs(self) -> list[Planned]:
        return [*([] if self.rollouts is None else [self.rollouts]), *self.runs]

    def lines(self) -> Iterator[str]:
        """Yields every command in order, in bash syntax, with masked secrets. The common flags appear once."""
        yield f"export PYTHONPATH={shlex.quote(self.python_path)}"
        if self.model_command:
            yield shlex.join(self.model_command)
        flags = [pair_up(mask_command(run.argv)) for run in self.all_runs()]
        alike = takewhile(lambda pairs: all(pair == pairs[0] for pair in pairs), zip(*flags, strict=False))
        shared = [pairs[0] for pairs in alike]
        yield "FLAGS=("
        yield from (f"    {shlex.join(pair)}" for pair in shared)
        yield ")"
        for pairs in flags:
            own = [word for pair in pairs[len(shared) :] for word in pair]
            yield f'{shlex.join(ENTRY)} "${{FLAGS[@]}}" {shlex.join(own)}'


def make_plan(tier: str, benchmark: Benchmark, out: Path, *, model: Path | None = None) -> BenchPlan:
    """Plans the runs of a tier, "module" or "e2e". `model` replaces the file's model if only flags are checked."""
    out, given = out.absolute(), benchmark.model
    if model is None:
        depth = "" if given.layers is None else f"-{given.layers}-layers"
        model = out / f"model-{given.arch}{depth}" if given.path is None else Path(given.path)
    data = str(model / ARITHMETIC / "train.jsonl") if benchmark.data == ARITHMETIC else benchmark.data
    common = [
        *("--hf-checkpoint", str(model), "--prompt-data", data),
        *benchmark.flags,
        *("--num-rollout", str(benchmark.steps)),
    ]
    switch, saved = benchmark.switch, str(out / "rollouts" / SAVED)

    def run(name: str, side: str | None, *more: str) -> Planned:
        run_dir = out / "runs" / name
        argv = (*common, *more, *tokens(switch.field, switch.of(side or BASELINE)), "--run-dir", str(run_dir))
        return Planned(name, side, run_dir, benchmark.steps, argv)

    rollouts, loads = None, list[str]()
    if tier == "module":
        quiet = ("--rlk-consistency", "off")  # it compares with a trainer, which this run lacks
        rollouts = run("rollouts", None, *quiet, "--debug-rollout-only", "--save-debug-rollout-data", saved)
        loads = ["--load-debug-rollout-data", saved]
    runs = []
    for i in range(benchmark.repeats):
        seeds = _seeds(benchmark.flags, i) if tier == "e2e" else ()
        runs += [run(f"{side}-{i}", side, *loads, *seeds) for side in SIDES]
    return BenchPlan(tier, benchmark, out, model, data, rollouts, tuple(runs))


def _seeds(flags: Sequence[str], repeat: int) -> tuple[str, ...]:
    """Returns the seed flags of a repeat: the seeds of the file, or the default seeds, plus the repeat's number."""
    found: list[str] = []
    for name in PER_PAIR if repeat else ():
        given = [value for group in split_argv(flags) if group.name == name for value in group.values]
        found += [spelled(name), str(int(given[-1] if given else str(own_flags()[name].default)) + repeat)]
    return tuple(found)


def resolved(run: Planned) -> dict[str, Any]:
    """Returns the resolved flags of a run, as the run will save them in config.json. ValueError for wrong flags.

    Hooks are loaded, so their folder must be on sys.path.
    """
    config = parse_config(run.argv)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        config.save_json(path)
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found


def refuse_unlike_runs(
    plan: BenchPlan, environments: Mapping[str, Mapping[str, object]] | None = None
) -> None:
    """Raises a ValueError before the runs if a report would reject the runs of `plan`: if the switch changes more than
    its field, or if finished runs had another machine, code or data.

    `environments` has finished runs' environments by name; the other runs would use the present environment. The report
    checks environment variables, because imports of a run set variables before the run records them.
    """
    finished = environments or {}
    now = collect_environment([], {}, [*prompt_files(plan.data), plan.model / "config.json"])
    now["variables"] = next((known["variables"] for known in finished.values()), {})
    sides: dict[str, list[Repeat]] = {side: [] for side in SIDES}
    for order, run in enumerate(plan.runs):
        assert run.side is not None
        config = resolved(run)
        environment = dict(finished.get(run.name, now))
        sides[run.side].append(Repeat(order, run.name, False, [], config, environment, {}))
    switch = switch_of(plan.benchmark.switch, sides)
    refuse_unlike(plan.benchmark.name, switch, list(zip(*sides.values(), strict=True)))


def switch_of(switch: Switch, sides: Mapping[str, Sequence[Repeat]]) -> Switch:
    """Returns the switch as the runs resolved it, or the file's value for a side without a run."""
    for side, repeats in sides.items():
        values = (config_flags(repeat.config)[switch.field] for repeat in repeats if repeat.config)
        value = next(values, switch.of(side))
        switch = replace(switch, baseline=value) if side == BASELINE else replace(switch, rl_kernel=value)
    return switch
