"""A long asynchronous run of the tiny model on a CPU, under seeded faults: how fast it recovers, and what is lost.

    bash scripts/soak.sh                        500 steps, a fault every 12 steps on average
    bash scripts/soak.sh --steps 40             each fault once

Faults: SIGKILL of the engine, the router, the rollout manager, a trainer rank, the driver, and Ray's raylet and
gcs_server; an engine that is stopped for some seconds. A run that ends is started again at once, by the same command.
The recovery is the time from a fault to the end of the first step whose batch was cut after it. At the end, the ledger
of the run (`vime doctor RUN_DIR`) must have no group that was lost or trained twice, and no sample older than
--max-staleness. Exit status 1 if it has, or if a recovery takes longer than --worst-s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from slime.tracking.events import EVENTS_FILE, read_events
from slime.tracking.ledger import read_ledger

REPOSITORY = Path(__file__).resolve().parent.parent
FAULTS = {
    "engine": r"-m vime\.vllm\.serve vllm\.entrypoints",
    "router": r"vime\.vllm\.router_main",
    "manager": r"^ray::RolloutActor",
    "trainer": r"^ray::TrainerActor",
    "driver": r"-P -m vime train",
    "raylet": r"raylet/raylet ",
    "gcs": r"gcs/gcs_server ",
    "stopped engine": r"-m vime\.vllm\.serve vllm\.entrypoints",
}
"""Name -> the command line of the process."""
STOPPED_S = 8.0
QUIET_S = 120.0
"""A run that makes no step for so long ends the soak."""


@dataclass
class Strike:
    """One fault. `recovery_s`: to the end of the next step; None until then."""

    kind: str
    step: int
    time: float
    recovery_s: float | None = None
    restarted: bool = False


@dataclass
class Soak:
    """`memory_mib`: step -> the largest resident sets of driver, manager and trainer."""

    run_dir: Path
    command: list[str]
    strikes: list[Strike] = field(default_factory=list)
    memory_mib: dict[int, dict[str, int]] = field(default_factory=dict)
    starts: int = 0

    def start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        with (self.run_dir.parent / "output.log").open("ab") as log:
            paths = [str(REPOSITORY), str(REPOSITORY / "examples" / "bench")]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
            return subprocess.Popen(
                self.command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def times(self, kind: str) -> list[tuple[int, float]]:
        """(rollout, time) of the events of a kind, in their order."""
        if not (self.run_dir / EVENTS_FILE).is_file():
            return []
        events = [event for event in read_events(self.run_dir) if event and event["kind"] == kind]
        return [(int(str(event["rollout"])), float(str(event["time"]))) for event in events]

    def trained(self) -> int:
        """The newest rollout that was trained, and 1 more."""
        steps = self.times("step")
        return steps[-1][0] + 1 if steps else 0

    def recovered(self, strike: Strike) -> float | None:
        """When the first step ended whose batch was cut after a fault."""
        cut = [(rollout, time) for rollout, time in self.times("batch") if time > strike.time]
        return min(
            (
                end
                for rollout, time in cut
                for trained, end in self.times("step")
                if trained == rollout and end > time
            ),
            default=None,
        )


def processes(pattern: str) -> list[psutil.Process]:
    """Processes of this soak with such a command line."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if re.search(pattern, " ".join(process.cmdline())):
                found.append(process)
    return found


def strike(kind: str, driver: int) -> float | None:
    """Cause a fault, and return its time. None if no such process runs."""
    found = [psutil.Process(driver)] if kind == "driver" else processes(FAULTS[kind])
    for process in found[:1]:
        with contextlib.suppress(psutil.Error):
            if kind != "stopped engine":
                process.kill()
                return time.time()
            process.suspend()
            struck = time.time()
            time.sleep(STOPPED_S)
            process.resume()
            return struck
    return None


def note_memory(run: Soak) -> None:
    step = run.trained()
    for name in ("driver", "manager", "trainer"):
        with contextlib.suppress(psutil.Error):
            sizes = [process.memory_info().rss >> 20 for process in processes(FAULTS[name])]
            if sizes:
                run.memory_mib.setdefault(step, {})[name] = max(sizes)


def flags(work: Path, run_dir: Path, steps: int, staleness: int) -> list[str]:
    return [
        *("--device", "cpu", "--rollout-num-gpus", "1", "--actor-num-gpus-per-node", "1"),
        *("--hf-checkpoint", str(work / "tiny/base"), "--prompt-data", str(work / "tiny/train.jsonl")),
        *("--input-key", "prompt", "--label-key", "label", "--apply-chat-template", "--rollout-shuffle"),
        *("--custom-generate-function-path", "lengths.generate", "--custom-rm-path", "untrained.odd_share"),
        *("--num-rollout", str(steps), "--rollout-batch-size", "8", "--n-samples-per-prompt", "4"),
        *("--num-steps-per-rollout", "1", "--rollout-max-response-len", "128"),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "2048", "--lr", "1e-4"),
        *("--use-rollout-logprobs", "--max-staleness", str(staleness), "--run-dir", str(run_dir)),
        *("--save", str(run_dir / "checkpoint"), "--load", str(run_dir / "checkpoint")),
        *("--save-interval", "4", "--max-actor-ckpt-to-keep", "2", "--seed", "0"),
    ]


def run_under_faults(soak: Soak, plan: list[tuple[int, str]], steps: int) -> None:
    """Run to `steps`, and cause each fault of `plan`, (step, name), when its step was reached."""
    run = soak.start()
    waiting: Strike | None = None
    moved, seen = time.time(), 0
    while True:
        time.sleep(0.25)
        ended = len(soak.times("step"))
        if ended > seen:
            seen, moved = ended, time.time()
            note_memory(soak)
        if waiting and (end := soak.recovered(waiting)) is not None:
            waiting.recovery_s = end - waiting.time
            print(f"step {waiting.step}: {waiting.kind}: {waiting.recovery_s:.1f} s", flush=True)
            waiting = None
        if run.poll() is not None:
            if soak.trained() >= steps:
                return
            if waiting is None:
                raise RuntimeError(f"the run ended with {run.returncode} without a fault: see output.log")
            waiting.restarted = True
            run = soak.start()
        elif plan and waiting is None and ended and soak.trained() >= plan[0][0]:
            step, kind = plan.pop(0)
            time.sleep(random.uniform(0.0, 0.5))
            if (struck := strike(kind, run.pid)) is not None:
                waiting = Strike(kind, step, struck)
                soak.strikes.append(waiting)
        if time.time() - moved > QUIET_S:
            raise RuntimeError(f"no step for {QUIET_S:.0f} s after {waiting}: see output.log")


def report(soak: Soak, worst_s: float) -> tuple[str, bool]:
    """Lines for people, and whether all is well."""
    ledger = read_ledger(soak.run_dir)
    times = [strike.recovery_s for strike in soak.strikes if strike.recovery_s is not None]
    lines = [
        f"{len(soak.strikes)} faults, {soak.starts} starts; recovery: median {statistics.median(times or [0]):.1f} s, "
        f"worst {max(times, default=0):.1f} s"
    ]
    for kind in FAULTS:
        found = [s.recovery_s for s in soak.strikes if s.kind == kind and s.recovery_s is not None]
        if found:
            lines.append(f"  {kind:<15} {len(found)} times, median {statistics.median(found):.1f} s")
    lines.append(
        f"groups: {ledger.groups_trained} trained, {ledger.again} drawn again, lost {ledger.lost or 'none'}, "
        f"in two batches {sorted(ledger.twice) or 'none'}; samples too old: {ledger.over_limit}"
    )
    good = ledger.is_exact and not ledger.over_limit and max(times, default=0) <= worst_s
    return "\n".join(lines), good and len(times) == len(soak.strikes)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--every", type=float, default=12.0, help="mean number of steps between two faults")
    parser.add_argument("--seed", type=int, default=0, help="decides the faults and their steps")
    parser.add_argument("--faults", help=f"of {', '.join(FAULTS)}, with commas; default: all")
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--worst-s", type=float, default=60.0, help="the longest recovery that passes")
    parser.add_argument("--work", type=Path, default=Path("runs/soak"), help="a new folder")
    parser.add_argument("--out", type=Path, help="a JSON file for the record")
    arguments = parser.parse_args(argv)
    kinds = arguments.faults.split(",") if arguments.faults else list(FAULTS)
    if unknown := set(kinds) - FAULTS.keys():
        parser.error(f"--faults must be of {', '.join(FAULTS)}, got {unknown.pop()}")
    work = arguments.work.resolve()
    run_dir = work / "run"
    if run_dir.exists():
        parser.error(f"--work must be a new folder, got {work} with a run; name another")
    if not (work / "tiny/base/config.json").is_file():
        script = str(REPOSITORY / "scripts/make_tiny_model.py")
        subprocess.run([sys.executable, script, str(work / "tiny")], check=True)
    chance = random.Random(arguments.seed)
    random.seed(arguments.seed)
    rounds = max(1, round(arguments.steps / arguments.every / len(kinds)))
    names = [kind for _ in range(rounds) for kind in chance.sample(kinds, len(kinds))]
    gap = (arguments.steps - 8) / len(names)
    plan = [(4 + int(gap * (i + chance.random())), kind) for i, kind in enumerate(names)]
    command = [sys.executable, "-P", "-m", "vime", "train"]
    soak = Soak(run_dir, [*command, *flags(work, run_dir, arguments.steps, arguments.staleness)])
    _adopt_orphans()
    try:
        run_under_faults(soak, plan, arguments.steps)
    except RuntimeError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    finally:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
    text, good = report(soak, arguments.worst_s)
    print(text)
    if arguments.out:
        record = {"steps": arguments.steps, "strikes": [asdict(s) for s in soak.strikes], "report": text}
        record["memory_mib"] = soak.memory_mib
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if good else 1


def _adopt_orphans() -> None:
    """Processes whose parent was killed become children of this one, so that it finds and ends them."""
    import ctypes

    subreaper = 36  # PR_SET_CHILD_SUBREAPER
    ctypes.CDLL(None, use_errno=True).prctl(subreaper, 1, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
