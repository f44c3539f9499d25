"""Runs the flags of a rehearsal: starts the training, kills everything after a saved step, and resumes to the end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slime.checkpoints.checkpoint_files import iterations
from slime.rollout.rewards.finite import REASON
from slime.tracking.trackers import METRICS_FILE, MetricLines
from vime.doctor.finding import Finding, ok, problem
from vime.doctor.records import check_groups
from vime.soak.parts import Descendants
from vime.soak.progress import ProgressReader

KILL_AFTER = 2
"""Number of trained rollouts after which the run is killed. The second one was generated with updated weights."""
LOOK_S = 0.2
LAST_LINES = 12
DIFFERENCE = 0.2
"""Largest mean difference of log-probs of trainer and engine. In bfloat16, a tiny model has about 0.01."""
REMOVED = f"rollout/removed/{REASON}"
"""Metric with the number of samples whose reward was not finite."""
ERROR = re.compile(r"^(vime train: |note: )")


@dataclass
class Outcome:
    """The steps that a rehearsal has done, and its findings."""

    done: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return any(finding.status == "problem" for finding in self.findings)


def rehearse_run(
    argv: Sequence[str], folder: Path, base: Path, variables: Mapping[str, str], deadline: float
) -> Outcome:
    """Trains, kills, resumes and checks. `base` is the folder of the launch. `deadline` is a monotonic time."""
    outcome, run_dir = Outcome(), folder / "run"
    environ = {**os.environ, **variables, "PYTHONUNBUFFERED": "1"}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [environ.get("PYTHONPATH"), str(base)]))
    environ.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-P", "-m", "vime", "train", *argv]
    first, trained = _run(
        command, environ, base, folder / "first.log", run_dir, deadline, kill_after=KILL_AFTER
    )
    if trained:
        outcome.done.append(f"{trained} rollouts generated, scored, trained and sent to the engine")
    if first != "killed":
        outcome.findings.append(_ended(first, folder / "first.log", trained))
        return outcome
    saved = iterations(folder / "checkpoint")
    outcome.done.append(
        f"all processes killed after the checkpoint of rollout {KILL_AFTER - 1} (saved: {len(saved)})"
    )
    second, trained = _run(command, environ, base, folder / "second.log", run_dir, deadline)
    if second != 0:
        outcome.findings.append(_ended(second, folder / "second.log", trained))
        return outcome
    outcome.done.append("resumed from the checkpoint and trained the last rollout")
    outcome.findings += [*check_groups(run_dir), *_check_metrics(run_dir)]
    return outcome


def _run(
    command: Sequence[str],
    environ: Mapping[str, str],
    base: Path,
    log: Path,
    run_dir: Path,
    deadline: float,
    kill_after: int | None = None,
) -> tuple[int | str, int]:
    """Returns the exit code, "killed" or "late", and the number of trained rollouts. Leaves no process of the run."""
    started = Descendants()
    reader = ProgressReader(run_dir)
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, cwd=base, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while (code := process.poll()) is None:
                time.sleep(LOOK_S)
                trained = reader.read().trained
                if (
                    kill_after is not None
                    and trained >= kill_after
                    and _has_saved(run_dir.parent, kill_after)
                ):
                    return "killed", trained
                if time.monotonic() > deadline:
                    return "late", trained
            return code, reader.read().trained
        finally:
            started.end()
            process.wait()
            reader.close()


def _has_saved(folder: Path, rollouts: int) -> bool:
    return len(iterations(folder / "checkpoint")) >= rollouts


def _ended(code: int | str, log: Path, trained: int) -> Finding:
    """Describes a run that did not reach its end."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    if code == "late":
        where = f"after {trained} rollouts; the last lines: " + " | ".join(lines[-3:])
        return problem("run", f"not done at the deadline, {where}", f"look at {log}, or raise --deadline-s")
    if code == 0:
        return problem("run", f"ended after {trained} rollouts, before the kill", f"look at {log}")
    error = next((i for i, line in enumerate(lines) if line.startswith("vime train: ")), None)
    shown = lines[-LAST_LINES:] if error is None else lines[error:]
    return problem("run", "\n".join(line[:600] for line in shown if line.strip()), f"look at {log}")


def _check_metrics(run_dir: Path) -> list[Finding]:
    """Checks that every step's loss and gradient are finite, that something was learned, and that trainer and engine
    agree on the log-probs."""
    lines = list(MetricLines(run_dir / METRICS_FILE))
    norms = [line["train/grad_norm"] for line in lines if "train/grad_norm" in line]
    gaps = [
        line["train/train_rollout_logprob_abs_diff"]
        for line in lines
        if "train/train_rollout_logprob_abs_diff" in line
    ]
    found = []
    if removed := sum(line.get(REMOVED, 0) for line in lines):
        remedy = "correct the reward: a run trains without these samples"
        found.append(problem("reward", f"must be finite, got nan or inf for {removed:g} samples", remedy))
    if not norms or not all(norm == norm and abs(norm) < float("inf") for norm in norms):
        found.append(problem("gradient", f"must be finite, got {norms}", "look at the loss and its inputs"))
    elif max(norms) == 0:
        found.append(
            problem("gradient", "is 0 in every step", "look at rewards, masks and the advantage estimator")
        )
    else:
        found.append(ok("gradient", f"norms {', '.join(f'{norm:.3g}' for norm in norms)}"))
    if gaps and max(gaps) > DIFFERENCE:
        remedy = "look at the generate function: tokens, loss_mask and rollout_log_probs must be of the same positions"
        found.append(problem("log-probs", f"trainer and engine differ by {max(gaps):.3g} on average", remedy))
    elif gaps:
        found.append(ok("log-probs", f"trainer and engine differ by at most {max(gaps):.1e} on average"))
    return found
