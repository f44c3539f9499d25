"""A soak test: a long asynchronous run of the tiny model on a CPU under seeded faults. It measures recovery and losses.

    bash scripts/soak.sh                                        500 steps, the last 200 without faults
    bash scripts/soak.sh --steps 40 --every 3 --quiet-steps 0   each fault once

scripts/lib/soak_faults.py lists the faults. If the run ends, the same command starts it again at once. Every request
goes through a proxy, and the run directory is on a separate small disk.

The recovery is the time from a fault until no group from before the fault can still run. That is the end of the first
step whose batch was made after the fault, plus --max-staleness more steps. After a restart, only later batches count.

The soak test passes (exit status 0) under these conditions. The ledger of the run (`vime doctor RUN_DIR`) has no group
that was lost or trained twice, and no sample older than --max-staleness. Every planned fault was caused. The median and
the longest recovery are short enough. Memory, open files and threads of no part grow by more than the allowance in
scripts/lib/soak_parts.py.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from slime.tracking.journal import read_events
from slime.tracking.kinds import EVENTS_FILE

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY / "scripts/lib"), str(REPOSITORY / "benchmarks")]
sys.path.insert(0, str(REPOSITORY / "examples/bench"))
from soak_faults import FAULTS, Place, mount_small_disk, unmount  # noqa: E402
from soak_parts import Reading, readings  # noqa: E402
from soak_proxy import Proxy  # noqa: E402
from soak_report import Strike, Task, make_record, markdown, write  # noqa: E402

QUIET_S = 120.0
"""Seconds without a step after which the soak test ends, if they are more than twice the longest allowed recovery."""
LATE_END_S = 60.0
"""A run that ends within this number of seconds after the last fault has ended because of the fault."""
DEADLINE_S = 40.0
"""Value of --rollout-deadline-s. An engine must restart within this time, and the client must repeat a request whose
reply was lost (the client's SILENT_S)."""
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


@dataclass
class Soak:
    """A run under faults, and its observations."""

    run_dir: Path
    command: list[str]
    task: Task
    proxy: Proxy
    strikes: list[Strike] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    starts: int = 0
    _read_step: int = -1

    def start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        with (self.run_dir.parent / "output.log").open("ab") as log:
            paths = [REPOSITORY, REPOSITORY / "examples/bench", REPOSITORY / "scripts/lib"]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
            return subprocess.Popen(
                self.command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def look(self) -> Progress:
        """Reads the run's progress from its events, and reads its parts after a new step."""
        progress = Progress()
        if (self.run_dir / EVENTS_FILE).is_file():
            for event in read_events(self.run_dir, ("step", "batch")):
                at = event["rollout"], event.time
                (progress.steps if event.kind == "step" else progress.batches).append(at)
        if progress.trained != self._read_step:
            self._read_step = progress.trained
            self.readings += readings(progress.trained)
        return progress


@dataclass
class Progress:
    """(rollout, time) for each end of a step, and for each finished batch."""

    steps: list[tuple[int, float]] = field(default_factory=list)
    batches: list[tuple[int, float]] = field(default_factory=list)

    @property
    def trained(self) -> int:
        """Number of the newest trained rollout, plus 1."""
        return self.steps[-1][0] + 1 if self.steps else 0

    def recovered(self, since: float, more: int) -> float | None:
        """Returns the end of the step that is `more` steps after the first step whose batch was made after `since`."""
        cut = [(rollout, at) for rollout, at in self.batches if at > since]
        ends = {}
        for rollout, at in cut:
            if end := next((end for trained, end in self.steps if trained == rollout and end > at), None):
                ends.setdefault(rollout, end)
        return sorted(ends.values())[more] if len(ends) > more else None


def flags(work: Path, run_dir: Path, steps: int, staleness: int) -> list[str]:
    return [
        *("--device", "cpu", "--rollout-num-gpus", "1", "--actor-num-gpus-per-node", "1"),
        *("--hf-checkpoint", str(work / "tiny/base"), "--prompt-data", str(work / "tiny/train.jsonl")),
        *("--input-key", "prompt", "--label-key", "label", "--apply-chat-template", "--rollout-shuffle"),
        *("--custom-generate-function-path", "soak_generate.generate"),
        *("--custom-rm-path", "untrained.odd_share", "--rollout-deadline-s", str(DEADLINE_S)),
        *("--num-rollout", str(steps), "--rollout-batch-size", "8", "--n-samples-per-prompt", "4"),
        *("--num-steps-per-rollout", "1", "--rollout-max-response-len", "128"),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "2048", "--lr", "1e-4"),
        *("--use-rollout-logprobs", "--max-staleness", str(staleness), "--run-dir", str(run_dir)),
        *("--save", str(run_dir / "checkpoint"), "--load", str(run_dir / "checkpoint")),
        *("--save-interval", "4", "--max-actor-ckpt-to-keep", "2", "--seed", "0"),
    ]


class Runner:
    """Runs to the last step, and causes each fault of the plan, (step, name), after its step was reached."""

    def __init__(self, soak: Soak, plan: list[tuple[int, str]]) -> None:
        self.soak, self.plan = soak, plan
        self.run = soak.start()
        self.waiting: Strike | None = None
        self.ending: tuple[float, Callable[[], None]] | None = None
        """The time at which the present fault ends, and the function that ends it."""

    def until_done(self) -> None:
        moved, seen = time.time(), 0
        while True:
            time.sleep(0.25)
            progress = self.soak.look()
            if len(progress.steps) > seen:
                seen, moved = len(progress.steps), time.time()
            self._end_fault(time.time())
            self._note_recovery(progress)
            if self.run.poll() is not None:
                if progress.trained >= self.soak.task.steps and self.run.returncode == 0:
                    return
                self._start_again()
                moved = time.time()
            elif self._is_due(progress):
                self._strike(*self.plan[0])
            if (quiet_s := time.time() - moved) > max(QUIET_S, 2 * self.soak.task.worst_s):
                raise RuntimeError(f"no step for {quiet_s:.0f} s after {self.waiting}: see output.log")

    def _is_due(self, progress: Progress) -> bool:
        """Returns whether the next fault of the plan may begin. Faults do not overlap."""
        idle = self.waiting is None and bool(progress.steps) and bool(self.plan)
        return idle and progress.trained >= self.plan[0][0]

    def _strike(self, step: int, kind: str) -> None:
        time.sleep(random.uniform(0.0, 0.5))  # at any moment of a step
        fault, place = (
            FAULTS[kind],
            Place(self.soak.run_dir, psutil.Process(self.run.pid), self.soak.proxy),
        )
        hit = self.soak.proxy.hit
        now = time.time()
        if not fault.begin(place):
            return  # The process is starting. The next look tries again.
        self.plan.pop(0)
        self.waiting = Strike(kind, step, now, replies_before=hit)
        self.soak.strikes.append(self.waiting)
        self.ending = now + fault.holds_s, lambda: fault.end(place)

    def _end_fault(self, now: float) -> None:
        if self.ending and now >= self.ending[0]:
            self.ending[1]()
            self.ending = None

    def _note_recovery(self, progress: Progress) -> None:
        if (strike := self.waiting) is None or self.ending:
            return
        if FAULTS[strike.kind].ends_run and not strike.restarted:
            return  # After the death of gcs_server, a run continues for seconds.
        end = progress.recovered(strike.restarted or strike.time, self.soak.task.staleness)
        if end is None:
            return
        strike.recovery_s = end - strike.time
        strike.replies = self.soak.proxy.hit - strike.replies_before
        restarted = ", restarted" if strike.restarted else ""
        print(f"step {strike.step}: {strike.kind}: {strike.recovery_s:.1f} s{restarted}", flush=True)
        self.waiting = None

    def _start_again(self) -> None:
        """Starts the run again, but only after a fault. A run that ends without a fault has failed."""
        self._end_fault(float("inf"))
        last = self.soak.strikes[-1] if self.soak.strikes else None
        if last is None or (self.waiting is None and time.time() - last.time > LATE_END_S):
            raise RuntimeError(f"the run ended with {self.run.returncode} without a fault: see output.log")
        self.waiting = last
        last.recovery_s, last.restarted = None, time.time()
        self.run = self.soak.start()


def make_plan(arguments: argparse.Namespace, kinds: list[str]) -> list[tuple[int, str]]:
    """Plans each fault equally often, in random order, at random steps before the quiet steps at the end."""
    chance = random.Random(arguments.seed)
    struck = arguments.steps - arguments.quiet_steps - 8
    rounds = max(1, round(struck / arguments.every / len(kinds)))
    names = [kind for _ in range(rounds) for kind in chance.sample(kinds, len(kinds))]
    return [(4 + int(struck / len(names) * (i + chance.random())), kind) for i, kind in enumerate(names)]


def parsed(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--every", type=float, default=12.0, help="mean number of steps between two faults")
    parser.add_argument(
        "--quiet-steps", type=int, default=200, help="the last steps, without faults, which show the memory"
    )
    parser.add_argument("--seed", type=int, default=0, help="decides the faults and their steps")
    parser.add_argument("--faults", help=f"of {', '.join(FAULTS)}, with commas; default: all")
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--median-s", type=float, default=15.0, help="the longest median recovery")
    parser.add_argument("--worst-s", type=float, default=60.0, help="the longest recovery that passes")
    parser.add_argument("--work", type=Path, default=Path("runs/soak"), help="a new folder")
    parser.add_argument("--note", default="", help="what else ran on the machine, for the record")
    parser.add_argument("--out", type=Path, help="a name for the record: NAME.json and NAME.md")
    arguments = parser.parse_args(argv)
    kinds = arguments.faults.split(",") if arguments.faults else list(FAULTS)
    if unknown := set(kinds) - FAULTS.keys():
        parser.error(f"--faults must be of {', '.join(FAULTS)}, got {unknown.pop()}")
    if (arguments.work / "run").exists():
        parser.error(f"--work must be a new folder, got {arguments.work} with a run; name another")
    if arguments.steps - arguments.quiet_steps < 8 + 2 * len(kinds):
        parser.error(
            f"--steps must leave {8 + 2 * len(kinds)} steps before the last --quiet-steps, got {arguments.steps} and "
            f"{arguments.quiet_steps}"
        )
    return arguments, kinds


def main(argv: list[str]) -> int:
    arguments, kinds = parsed(argv)
    work = arguments.work.resolve()
    run_dir = work / "run"
    if not (work / "tiny/base/config.json").is_file():
        script = str(REPOSITORY / "scripts/make_tiny_model.py")
        subprocess.run([sys.executable, script, str(work / "tiny")], check=True)
    left_out = {}
    if refused := mount_small_disk(run_dir):
        print(f"soak: LEFT OUT: full disk: {refused}", file=sys.stderr)
        left_out["full disk"] = refused
    plan = make_plan(arguments, [kind for kind in kinds if kind not in left_out])
    task = Task(
        argv, arguments.steps, arguments.staleness, arguments.median_s, arguments.worst_s, arguments.note
    )
    command = [sys.executable, "-P", "-m", "vime", "train"]
    command += flags(work, run_dir, arguments.steps, arguments.staleness)
    random.seed(arguments.seed)
    # Processes whose parent was killed become children of this process, so that it finds and ends them.
    ctypes.CDLL(None, use_errno=True).prctl(SUBREAPER, 1, 0, 0, 0)
    soak = Soak(run_dir, command, task, Proxy(work))
    broken = None
    # The test still writes its record after a SIGTERM.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        Runner(soak, plan).until_done()
    except (RuntimeError, KeyboardInterrupt) as error:
        broken = str(error) or type(error).__name__
    finally:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
    soak.proxy.close()
    record = make_record(run_dir, task, soak.strikes, soak.readings, soak.starts, plan, left_out, broken)
    if not left_out:
        keep(run_dir, work / "kept")
    print(markdown(record))
    if arguments.out:
        write(record, arguments.out)
    return 1 if record["failures"] else 0


def keep(run_dir: Path, to: Path) -> None:
    """Copies the run's records from the small disk, without its checkpoints, and unmounts the disk."""
    shutil.copytree(run_dir, to, ignore=shutil.ignore_patterns("checkpoint", "filler"))
    for _ in range(50):  # Killed processes may keep files open for a moment.
        try:
            return unmount(run_dir)
        except subprocess.CalledProcessError:
            time.sleep(0.2)
    unmount(run_dir)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
