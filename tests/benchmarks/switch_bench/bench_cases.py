"""Records of benchmarks with known results for the tests of switch_bench, from seeded numbers."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from switch_bench.record import SIDES, Record, Repeat, Switch

from slime.tracking.environment import installed_packages

packages = cache(installed_packages)
"""Installed packages, read once, because reading takes half a second and each run and each plan does it."""

CONFIG: dict[str, Any] = {
    "rollout": {"rollout_batch_size": 32, "rollout_seed": 42, "hf_checkpoint": "/models/qwen3-4b"},
    "train": {"lr": 1e-6, "seed": 1234},
    "weight_update": {"weight_dir": None},
    "checkpoint": {"load": None},
    "cluster": {
        **{"device": "cuda", "colocate": True, "rollout_num_gpus": 2},
        **{"actor_num_nodes": 1, "actor_num_gpus_per_node": 2},
    },
    "logging": {"run_dir": None},
    "kernels": {"rlk_fast": None, "rl_kernel_ops": ["logp", "grpo_loss"]},
}
ENVIRONMENT: dict[str, Any] = {
    "time": "2026-01-01T00:00:00+00:00",
    "command": ["vime", "train"],
    "directory": "/runs",
    "git": {"commit": "0123456789abcdef", "modified": False},
    "python": {"version": "3.11.9", "executable": "python"},
    "packages": {"torch": "2.9.0", "triton": "3.5.0", "vllm": "0.12.0", "unrelated": "1.0"},
    "host": {"name": "host-a", "platform": "Linux"},
    "cpu": {"model": "EPYC", "cores": 64, "usable_cores": 64, "memory_bytes": 1},
    "gpus": [{"name": "NVIDIA H200", "driver": "580.1", "memory_mib": "143771"}] * 2,
    "variables": {"CUDA_HOME": "/usr/local/cuda"},
}
PARTS = {
    "train_wait": 3.0,
    "sleep": 0.05,
    "handover": 0.06,
    "ref_log_probs": 0.5,
    "log_probs": 0.6,
    "forward": 0.9,
    "policy_loss": 0.4,
    "backward": 1.8,
    "optimizer": 0.2,
    "update_weights": 0.35,
}
PEAKS = {"trainer": 71.0, "forward": 60.0, "policy_loss": 66.0, "backward": 71.0, "optimizer": 52.0}


def correlated(rng: np.random.Generator, steps: int, rho: float) -> np.ndarray:
    """Returns [steps] of a stationary first-order autoregression with variance 1."""
    noise = rng.normal(size=steps) * np.sqrt(1 - rho**2)
    values = np.empty(steps)
    values[0] = rng.normal()
    for i in range(1, steps):
        values[i] = rho * values[i - 1] + noise[i]
    return values


def step_rows(rng: np.random.Generator, steps: int, *, slower: float) -> list[Any]:
    """Returns a run's step metrics: a trainer up to `slower` (a share) longer, correlated noise, a reward
    that rises."""
    level = 1 + 0.002 * rng.normal()  # the run's own level, which its steps share
    noise = 0.02 * correlated(rng, steps, 0.5)
    rows = []
    for k in range(steps):
        warm = 4.0 if k == 0 else 1.0
        scale = warm * level * (1 + noise[k])
        longer = {name: 1 + slower * (name != "train_wait") for name in PARTS}
        times = {f"perf/{name}_time": mean * scale * longer[name] for name, mean in PARTS.items()}
        total = sum(times.values()) * 1.01
        tokens = 60_000
        row = {
            **times,
            "perf/step_time": total,
            "perf/rollout_time": times["perf/train_wait_time"] * 0.97,
            "perf/step_tokens_per_sec": tokens / total,
            "perf/step_tokens_per_gpu_per_sec": tokens / total / 2,
            **{f"perf/{name}_peak_gib": gib for name, gib in PEAKS.items()},
            "rollout/raw_reward": 0.3 + 0.4 * k / steps + 0.02 * rng.normal(),
            "train/train_rollout_logprob_abs_diff": 1e-3 * np.exp(0.2 * rng.normal()),
            "train/ppo_kl": 1e-4 * np.exp(0.3 * rng.normal()),
            "train/loss": 0.01 * rng.normal(),
            "train/grad_norm": 0.5 * np.exp(0.1 * rng.normal()),
        }
        rows.append({name: float(value) for name, value in row.items()})
    return rows


def a_repeat(run: str, order: int, steps: list[Any], mode: str) -> Repeat:
    """Returns a finished run. `mode`: rlk_fast of its configuration."""
    config = deepcopy(CONFIG)
    config["kernels"]["rlk_fast"] = mode
    config["logging"] |= {"run_dir": f"/runs/{run}", "dump_details": f"/runs/{run}/details"}
    config["weight_update"]["weight_dir"] = f"/dev/shm/{run}"
    return Repeat(order, run, True, steps, config, deepcopy(ENVIRONMENT), {})


def full_steps(
    *, repeats: int = 3, steps: int = 25, gain: float = 0.0, seed: int = 0, **changed: Any
) -> Record:
    """Returns runs A B A B of whole steps; rl_kernel is `gain` (a share) faster, with 8 % less memory."""
    rng = np.random.default_rng(seed)
    sides: dict[str, list[Repeat]] = {side: [] for side in SIDES}
    for i in range(repeats):
        for j, (side, mode) in enumerate(zip(SIDES, ("off", "auto"), strict=True)):
            rows = step_rows(rng, steps, slower=-gain * j)
            for row in rows if j else []:
                row["perf/trainer_peak_gib"] *= 0.92
                row["rl_kernel/fast"] = 1.0
            sides[side].append(a_repeat(f"{side}-{i}", 2 * i + j, rows, mode))
    record = Record(
        tier="e2e",
        name="qwen3-4b-grpo",
        claim="baseline against rl_kernel",
        command="vime bench e2e qwen3-4b.yaml --repeats 3",
        notes=[],
        switch=Switch("rlk_fast", "off", "auto"),
        warm_up=1,
        sides=sides,
        preset=None,
        experts=0,
    )
    return replace(record, **changed)


def changed(record: Record, side: str, i: int, change: Callable[[Repeat], Repeat]) -> Record:
    """Returns `record` with `change` applied to a copy of repeat i of a side."""
    sides = {name: list(repeats) for name, repeats in record.sides.items()}
    sides[side][i] = change(deepcopy(sides[side][i]))
    return replace(record, sides=sides)
