"""Sends a signal to a trainer rank of a real run, and prints the seconds until the run goes on.

    python benchmarks/recovery/trainer_kill.py RUN_DIR OUT.json COMMAND ...      STEP=3 SIGNAL=KILL (or STOP)

COMMAND starts the run in RUN_DIR (--run-dir): `vime train` or a launcher of scripts/. The signal follows the journal's
event of step STEP. The exit code is 0 if the trainer was started again and the command has succeeded.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from slime.tracking.journal import Event, read_events
from vime.soak.parts import Descendants

TIMES = ("step", "train_wait", "train", "save_in_memory", "update_weights", "save_model")


def find(run_dir: Path, *kinds: str) -> list[Event]:
    return list(read_events(run_dir, kinds)) if (run_dir / "events.jsonl").exists() else []


def measure(run_dir: Path, sent: float) -> dict[str, object]:
    """Returns the seconds of each restart, the events after the signal, and the times of each step in seconds."""
    found = [
        event for event in find(run_dir, "trainer_lost", "trainer_restarted", "step") if event.time > sent
    ]
    events = [{"event": e.kind, "seconds_after_signal": round(e.time - sent, 2), **e.fields} for e in found]
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    times = [{n: row[f"perf/{n}_time"] for n in TIMES if f"perf/{n}_time" in row} for row in rows]
    restarts = [event["seconds"] for event in found if event.kind == "trainer_restarted"]
    return {"restart_s": restarts, "events": events, "step_s": [one for one in times if one]}


def main(run_dir: Path, out: Path, command: list[str]) -> int:
    step, name, started = int(os.environ.get("STEP", "3")), os.environ.get("SIGNAL", "KILL"), Descendants()
    try:
        run = subprocess.Popen(command)
        while not any(event["rollout"] >= step for event in find(run_dir, "step")):
            if run.poll() is not None:
                sys.exit(f"the run must train step {step}, got its end with exit code {run.returncode}")
            time.sleep(0.05)
        sent = time.time()
        os.kill(started.find("trainer")[-1].pid, getattr(signal, f"SIG{name}"))
        code = run.wait()
    finally:
        started.end()
    record = {"signal": name, "command": command, "exit_code": code, "measured": measure(run_dir, sent)}
    out.write_text(text := json.dumps(record, indent=1), encoding="utf-8")
    print(text)
    return 0 if code == 0 and record["measured"]["restart_s"] else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
