"""`vime bench`: what rl_kernel changes, measured against the path without it, in three tiers.

    vime bench op [OP ...]        the operators alone, compared with other implementations
    vime bench module BENCHMARK      trainer steps on saved rollouts: log-probs, loss, backward, optimizer
    vime bench e2e BENCHMARK         whole steps, generation to weight transfer, both sides in turn
    vime bench plan BENCHMARK        the commands of module and e2e, checked, and their memory; starts no run
                                  --gpu-memory-gib 80: does it fit GPUs of that size, which need not be here
    vime bench report DIR ...     what they measured, as a page with pictures
    vime bench plot RECORD ...    the pictures alone, of records of any form; --all: of benchmarks/results

BENCHMARK is a YAML file (benchmarks/switch_bench/settings.py; examples/bench has some). Runs are `vime train` itself.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from slime.config.config_file import expand_config
from slime.config.near_names import nearest
from slime.config.secrets import mask_command
from slime.data.files import prompt_files
from slime.hardware import HARDWARE
from slime.plan.memory_decision import TOO_SMALL
from switch_bench.planning import BenchPlan, make_plan, refuse_unlike_runs
from switch_bench.record import OPERATORS_FILE, TIERS
from switch_bench.running import execute
from switch_bench.settings import ARITHMETIC, Benchmark, read_settings
from vime.backends import parse_config
from vime.memory.lines import memory_in_short
from vime.memory.sizes import GPU_MEMORY, RequestedSizes, for_gpus, gib, machine_sizes
from vime.run.prompts import prompts


def main(argv: Sequence[str]) -> int:
    """Runs one tier, or the report. ValueError for errors that the user can fix."""
    commands = {
        "op": _operators,
        "module": _runs,
        "e2e": _runs,
        "plan": _plan,
        "report": _report,
        "plot": _plot,
    }
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    if argv[0] not in commands:
        near = nearest(argv[0], commands, prefix="vime bench ")
        raise ValueError(f"the tier must be one of {', '.join(commands)}, got {argv[0]}{near}")
    return commands[argv[0]](argv[0], list(argv[1:]))


def _operators(tier: str, argv: list[str]) -> int:
    """Runs operator_bench with all its options, and writes its results to operators.json in --out."""
    parser = argparse.ArgumentParser(prog="vime bench op", add_help=False, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/operators"))
    given, rest = parser.parse_known_args(argv)
    from operator_bench import command as bench

    return bench.main([*rest, "--out", str(given.out / OPERATORS_FILE)])


def _report(tier: str, argv: list[str]) -> int:
    return importlib.import_module("switch_bench.report").main(argv) or 0


def _plot(tier: str, argv: list[str]) -> int:
    return importlib.import_module("switch_bench.plot").main(argv) or 0


def _runs(tier: str, argv: list[str]) -> int:
    arguments, benchmark = _read(tier, argv)
    plan = make_plan(tier, benchmark, arguments.out or _out(benchmark, tier))
    return execute(plan, shlex.join(mask_command(["vime", "bench", tier, *argv])))


def _plan(tier: str, argv: list[str]) -> int:
    arguments, benchmark = _read(tier, argv)
    size = None if arguments.gpu_memory_gib is None else gib(arguments.gpu_memory_gib)
    named = () if arguments.gpu is None else ("--gpu", arguments.gpu)
    benchmark = replace(benchmark, flags=(*for_gpus(benchmark.flags, size), *named))
    if size is None and arguments.gpu is not None:
        size = HARDWARE[arguments.gpu].memory_gib
    plans = [make_plan(each, benchmark, _out(benchmark, each)) for each in TIERS]
    return _show(plans, size)


def _out(benchmark: Benchmark, tier: str) -> Path:
    parts = (benchmark.name, benchmark.preset, tier)
    return Path("runs/bench") / "-".join(part for part in parts if part)


def _read(tier: str, argv: list[str]) -> tuple[argparse.Namespace, Benchmark]:
    """Returns the command line, and the benchmark that the command line and the file describe."""
    ours, flags = argv, []
    if "--" in argv:
        ours, flags = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    parser = argparse.ArgumentParser(
        prog=f"vime bench {tier}", allow_abbrev=False, epilog="what stands after -- are flags of `vime train`"
    )
    parser.add_argument(
        "benchmark", type=Path, metavar="BENCHMARK", help="a YAML file; docs/benchmarks.md shows one"
    )
    if tier == "plan":
        parser.add_argument(
            GPU_MEMORY, metavar="N", help="do both sides fit GPUs of N GiB; exit status 1 if not"
        )
        parser.add_argument(
            "--gpu", choices=HARDWARE, help=f"the same for this GPU; {GPU_MEMORY} wins where both are given"
        )
    else:
        parser.add_argument("--out", type=Path, metavar="DIR", help="default: runs/bench/NAME[-PRESET]-TIER")
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        dest="config_files",
        metavar="FILE",
        help="a YAML file with flags of `vime train` for both sides",
    )
    parser.add_argument("--preset", metavar="NAME", help="one of the file's presets")
    parser.add_argument("--steps", type=int, metavar="N", help="of each run, the warm-up included")
    parser.add_argument("--repeats", type=int, metavar="N", help="runs a side")
    parser.add_argument("--model", metavar="DIR", help="a Hugging Face directory instead of the file's model")
    parser.add_argument("--data", metavar="FILE", help="a prompt file instead of the file's data")
    parser.add_argument(
        "--note",
        action="append",
        default=[],
        metavar="TEXT",
        help="what a reader has to know, such as who else used the machine",
    )
    given = parser.parse_args(ours)
    benchmark = read_settings(given.benchmark, given.preset).with_line(
        steps=given.steps,
        repeats=given.repeats,
        model=given.model,
        data=given.data,
        flags=expand_config([token for name in given.config_files for token in ("--config", name)] + flags),
        notes=given.note,
    )
    if benchmark.data != ARITHMETIC and not _has_files(benchmark.data):
        raise ValueError(
            f"data of {given.benchmark} must be a prompt file that exists, got {benchmark.data}; name yours with "
            "--data, or take a --preset that makes its own (smoke, shallow: where the file has one)"
        )
    # Hooks can be in the folder of the file. The runs find them there too.
    sys.path.append(str(given.benchmark.absolute().parent))
    return given, benchmark


def _has_files(data: str) -> bool:
    try:
        return bool(prompt_files(data))
    except ValueError:
        return False


def _show(plans: Sequence[BenchPlan], size: float | None) -> int:
    """Checks every flag as a run would, on a model without weights, and prints the commands of `plans`. Returns 1 if a
    side does not fit GPUs of `size` GiB each."""
    with tempfile.TemporaryDirectory() as folder:
        stands_in = _without_weights(plans[0], Path(folder) / "model")
        told = [list(_checked(plan, stands_in, size)) for plan in plans]
    for plan, remarks in zip(plans, told, strict=True):
        print(f"# {plan.tier}: {plan.benchmark.repeats} x 2 runs of {plan.benchmark.steps} steps, {plan.out}")
        print("\n".join([*remarks, *plan.lines()]))
    verdicts = [re.match(rf"# \S+: (an engine )?{TOO_SMALL} ", line) for remarks in told for line in remarks]
    too_large = size is not None and any(verdicts)
    if size is None:
        fit = f"; do they fit your GPUs: vime bench plan {GPU_MEMORY} 80 ..."
    else:
        fit = f", but something {TOO_SMALL} GPUs of {size:g} GiB" if too_large else ""
    print(f"# the flags are good{fit}", flush=True)
    return int(too_large)


def _checked(plan: BenchPlan, model: Path | None, size: float | None) -> Iterator[str]:
    """Yields each side's memory estimate from `vime plan`, and its notes. ValueError for wrong flags."""
    once = make_plan(plan.tier, replace(plan.benchmark, repeats=1), plan.out, model=model)
    runs = {run.side or run.name: parse_config(run.argv) for run in once.all_runs()}
    refuse_unlike_runs(once)
    if plan.benchmark.data != ARITHMETIC:
        yield from (f"# {line}" for line in prompts(next(iter(runs.values()))))
    found: dict[str, list[str]] = {}
    for name, config in runs.items():
        for note in config.notes:
            found.setdefault(note, []).append(name)
        yield from (
            f"# {name}: {line}"
            for line in memory_in_short(config, machine_sizes(config, RequestedSizes(size)))
        )
    for note, names in found.items():
        whose = "" if len(names) == len(runs) else f" ({', '.join(names)})"
        yield f"# note{whose}: {note}"


def _without_weights(plan: BenchPlan, folder: Path) -> Path | None:
    """Makes the plan's random model without weights in `folder`. None if the user has named a model."""
    command = plan.model_command
    if command is None:
        return None
    command = [{"--random": "--no-weights", str(plan.model): str(folder)}.get(word, word) for word in command]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"model must be one that make_model.py makes, got: {done.stderr.strip()}")
    return folder
