"""Simulates `vime train` without training, with real flags and a real run's records.

    python bench_run_double.py FLAGS

The file BENCH_DOUBLE defines the end of the runs by name: {"baseline-1": {"steps": 1, "exit": 3}} stops after one
step with status 3, {"hang": true} waits for the signal that ends it. BENCH_DOUBLE.started gets a line for each start.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from slime.data.files import prompt_files
from slime.tracking import make_trackers, write_environment
from slime.tracking.metrics import LOGPROB_DIFF, LOGPROB_DIFF_MAX
from vime.backends import parse_config


def log_steps(config: Any, steps: int) -> None:
    """Logs `steps` rollouts of config.num_steps_per_rollout optimizer steps each; step i over all rollouts takes i +
    1 seconds."""
    trackers = make_trackers(config, Path(config.logging.run_dir), 0)
    fast = {"rl_kernel/logp/fallbacks": 2.0, "rl_kernel/swiglu/fallbacks": 0.0, "rl_kernel/fast": 0.5}
    for step in range(steps):
        told = {"perf/step_time": step + 1.0, "rollout/raw_reward": 0.5, "rollout/step": step}
        if config.debug.save_debug_rollout_data:
            path = Path(config.debug.save_debug_rollout_data.format(rollout_id=step))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"samples")
        trackers.log(told | (fast if config.kernels.rlk_fast != "off" else {}), step, "rollout/step")
        if config.debug.debug_rollout_only:
            continue
        for i in range(config.data.num_steps_per_rollout):
            number = step * config.data.num_steps_per_rollout + i
            loss = float("nan") if number == 3 else 0.25 * number
            trained = {
                "train/loss": loss,
                LOGPROB_DIFF: 1e-3 * i,
                LOGPROB_DIFF_MAX: 1e-2 * i,
                "train/step": number,
            }
            trackers.log(trained, number, "train/step")
        trackers.log({"perf/save_model_time": 9.0}, step, "rollout/step")
    trackers.log({"eval/test": 0.75}, steps, "eval/step")
    trackers.close()


def main(argv: list[str]) -> int:
    config = parse_config(argv)
    orders = Path(os.environ["BENCH_DOUBLE"])
    run_dir = Path(config.logging.run_dir)
    with orders.with_suffix(".started").open("a") as file:
        file.write(run_dir.name + "\n")
    order = json.loads(orders.read_text()).get(run_dir.name, {})
    run_dir.mkdir(parents=True)
    config.save_json(run_dir / "config.json")
    files = [*prompt_files(config.data.prompt_data), Path(config.rollout.hf_checkpoint) / "config.json"]
    write_environment(run_dir, ["vime", "train", *argv], files=files)
    log_steps(config, order.get("steps", config.data.num_rollout))
    if order.get("hang"):
        signal.signal(signal.SIGTERM, _end)
        (run_dir / "hangs").touch()
        time.sleep(600)
    if status := order.get("exit", 0):
        print("the last words of a run")
    return status


def _end(number: int, frame: FrameType | None) -> None:
    """Writes the files of an orderly end, so that a test can detect it."""
    Path(os.environ["BENCH_DOUBLE"]).with_suffix(".ended").touch()
    sys.exit(130)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
