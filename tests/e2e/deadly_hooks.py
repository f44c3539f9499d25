"""Hooks with which a trainer rank or the rollout manager sends itself a signal at a chosen moment, once per order."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any


def order(run_dir: Path, moment: str, number: int = signal.SIGKILL, times: int = 1) -> None:
    """Makes the first process that reaches `moment` send the signal to itself, and again after each restart."""
    run_dir.mkdir(parents=True, exist_ok=True)
    for count in range(times):
        (run_dir / f"deadly-{moment}.{count}").write_text(str(int(number)))


def obey(run_dir: str, moment: str) -> None:
    for path in sorted(Path(run_dir).glob(f"deadly-{moment}.*")):
        try:
            taken = path.rename(path.with_name(path.name.replace("deadly", "obeyed")))
        except FileNotFoundError:  # another process has taken it
            return
        os.kill(os.getpid(), int(taken.read_text()))


def in_step(args: Any, rollout_id: int, data: Any) -> None:
    """--rollout-data-postprocess-path: the data of a step is on the device."""
    obey(args.run_dir, f"step-{rollout_id}")


def after_write(args: Any, folder: str, engines: list[str]) -> None:
    """--custom-update-weight-post-write-path: the weights are written, and no engine has loaded them."""
    obey(args.run_dir, f"write-{Path(folder).name.rpartition('-')[2]}")


def reward(args: Any, sample: Any, **kwargs: Any) -> float:
    """--custom-rm-path: the responses of a group are there, and it has no reward."""
    obey(args.run_dir, f"reward-{sample.group_index}")
    return float(len(sample.response) % 2)


def in_log(rollout_id: int, args: Any, samples: Any, metrics: Any, rollout_time: float) -> bool:
    """--custom-rollout-log-function-path: the data position is saved, and the driver has no batch."""
    obey(args.run_dir, f"log-{rollout_id}")
    return False
