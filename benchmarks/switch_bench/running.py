"""Starts the runs of a plan one after the other, and resumes where an earlier call stopped.

A complete run is kept if its flags are unchanged, and never run again. An incomplete run is moved to runs/unfinished
and starts again. bench.json is written after each run. All started processes end with this process: regularly on
Ctrl-C and SIGTERM, and by their supervisor if this process is killed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from slime.rules.flags import FALLBACKS
from slime.tracking.environment import ENVIRONMENT_FILE, collect_environment
from switch_bench.planning import MAKE_MODEL, UNFINISHED, BenchPlan, Planned, refuse_unlike_runs, resolved
from switch_bench.run_dirs import collect, ended_well, how_it_ended, is_whole, read_saved, read_steps
from vime.pool.process import SupervisedProcess, sigterm_interrupts, tail
from vime.run.interrupts import exit_code
from vime.run.lock import lock
from vime.view.measures import config_flags

GRACE_S = 120.0
"""Seconds in which a run may end regularly, with a trainer in the middle of a step, engines and Ray."""
LOG_LINES = 5


def execute(plan: BenchPlan, command: str) -> int:
    """Makes the missing runs. Returns 0 if every run is complete and succeeded, 1 if a run failed, and 128 + the
    signal's number if interrupted.

    ValueError, before the first run, for wrong flags and for existing runs with other flags.
    """
    with sigterm_interrupts(), ExitStack() as held:
        # A second benchmark would treat these runs as unfinished, and move them while they write.
        lock("--out", plan.out, held)
        try:
            _make_model(plan)
            good = _run_all(plan, whats_missing(plan), command)
        except KeyboardInterrupt as interrupt:
            print("interrupted: what was started has been stopped; the same command goes on here", flush=True)
            if any(run.run_dir.is_dir() for run in plan.runs):
                collect(plan, command).write(plan.out)
            return exit_code(interrupt)
    return 0 if good else 1


def whats_missing(plan: BenchPlan) -> list[Planned]:
    """Returns the incomplete runs, in order. ValueError for complete runs with other flags, and for runs that could not
    be compared."""
    missing = []
    for run in plan.all_runs():
        # Every run is resolved here, so that wrong flags raise before the first run starts.
        expected = config_flags(resolved(run))
        found = config_flags(read_saved(run.run_dir / "config.json"))
        steps = len(read_steps(run.run_dir, trained=run.side is not None).values)
        # The run may be complete for its own --num-rollout, which can be smaller than the present one.
        if steps >= found.get("num_rollout", run.steps):
            _check_same(run, found, expected)
        if not is_whole(run, plan):
            missing.append(run)
    finished = [run for run in plan.runs if run not in missing]
    if missing:
        _refuse_unnamed_gpus(config_flags(resolved(missing[0])))
        refuse_unlike_runs(plan, {run.name: read_saved(run.run_dir / ENVIRONMENT_FILE) for run in finished})
    if plan.rollouts in missing and finished:
        raise ValueError(
            f"the saved rollouts in {plan.out / 'rollouts'} must be those that {finished[0].run_dir} was trained on, "
            "got not all of them; remove the runs, or take another --out"
        )
    return missing


def _refuse_unnamed_gpus(flags: Mapping[str, object]) -> None:
    """Raises a ValueError for runs on GPUs without a name, because a report cannot compare them."""
    if flags["device"] == "cuda" and not collect_environment([], {})["gpus"]:
        raise ValueError(
            "nvidia-smi must say which GPUs are here, got no answer: runs on unknown ones are not compared"
        )


def _check_same(run: Planned, found: Mapping[str, object], expected: Mapping[str, object]) -> None:
    # A run finds weight_dir once it has begun. A flag that takes the value of another comes after it.
    for name in sorted((expected.keys() | found.keys()) - {"weight_dir"}, key=lambda n: (n in FALLBACKS, n)):
        before, now = found.get(name), expected.get(name)
        if before != now:
            raise ValueError(
                f"{run.run_dir} must have been made with the flags of now, got {name} {before!r} then and {now!r} now; "
                "take another --out, or remove that directory"
            )


def _make_model(plan: BenchPlan) -> None:
    """Writes the random model, unless an earlier call has written it."""
    command = plan.model_command
    if command is None or (plan.model / "config.json").is_file():
        return
    log = plan.out / "model.log"
    print(f"model: {plan.benchmark.model.arch}, random weights, to {plan.model}", flush=True)
    # All commands here run with Python's safe path, which leaves out the folder of the script.
    beside = os.pathsep.join([str(MAKE_MODEL.parent), plan.python_path])
    if status := _run(command, log, beside):
        raise ValueError(
            f"{plan.model} must be made by make_model.py, got exit status {status}:\n{_last(log)}"
        )


def _run_all(plan: BenchPlan, missing: Sequence[Planned], command: str) -> bool:
    """Makes the runs of `missing`, and writes bench.json after each run. Returns whether all runs succeeded."""
    runs, good = plan.all_runs(), True
    for number, run in enumerate(runs, start=1):
        title = f"[{number}/{len(runs)}] {run.name}"
        if run not in missing:
            print(f"{title}: kept, {run.steps} steps", flush=True)
            good = good and ended_well(run)
            continue
        _set_aside(run)
        print(f"{title}: {run.steps} steps, log {run.log}", flush=True)
        began = time.monotonic()
        status = _run(run.command, run.log, plan.python_path)
        run.status.write_text(f"{status}\n", encoding="utf-8")
        if status == 0 and is_whole(run, plan):
            print(f"{title}: done in {time.monotonic() - began:.1f} s", flush=True)
        else:
            good = False
            print(f"{title}: {how_it_ended(run)}\nthe end of {run.log}:\n{_last(run.log)}", flush=True)
            if run.side is None:
                return False  # There are no rollouts to train on.
        if run.side is not None:
            collect(plan, command).write(plan.out)
    print(
        f"record: {collect(plan, command).write(plan.out)}, read by `vime bench report {plan.out}`",
        flush=True,
    )
    return good


def _set_aside(run: Planned) -> None:
    """Moves the directory of an unfinished run to runs/unfinished, with its log and status."""
    if not run.run_dir.exists():
        return
    folder = run.run_dir.parent / UNFINISHED
    folder.mkdir(exist_ok=True)
    number = 1 + len(list(folder.glob(f"{run.name}.*/")))
    for path in (run.run_dir, run.log, run.status):
        if path.exists():
            path.rename(folder / f"{run.name}.{number}{path.suffix}")


def _run(command: Sequence[str], log: Path, python_path: str) -> int:
    """Runs a command and returns its exit status. The command and its descendants have ended when this returns."""
    log.unlink(missing_ok=True)
    process = SupervisedProcess(command, {**os.environ, "PYTHONPATH": python_path}, str(log), grace_s=GRACE_S)
    try:
        while (status := process.poll()) is None:
            time.sleep(0.1)
        return status
    except KeyboardInterrupt:
        print(f"interrupted: the run has {GRACE_S:.0f} s to end in order", flush=True)
        raise
    finally:
        process.stop()


def _last(log: Path) -> str:
    return tail(str(log), LOG_LINES) or "no output"
