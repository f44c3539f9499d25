"""Defines the names and units of a run's metrics for the commands that compare runs, and the configuration fields that
may differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

PASS_TIME = "perf/pass_time"
"""The sum of the forward, loss and backward times. benchmarks/switch_bench/verdicts.py compares this sum and not its
parts."""
# Metric of a run's steps -> (label, unit, true if more is better or None if neither direction is better).
METRICS: dict[str, tuple[str, str, bool | None]] = {
    "perf/step_time": ("step", "s", False),
    "perf/rollout_time": ("rollout", "s", False),
    "perf/train_wait_time": ("waiting for the rollout", "s", False),
    "perf/log_probs_time": ("old log-probs", "s", False),
    "perf/ref_log_probs_time": ("reference log-probs", "s", False),
    "perf/forward_time": ("forward", "s", False),
    "perf/policy_loss_time": ("log-probs, ratio, KL and loss", "s", False),
    "rl_kernel/ratio_kl/ms": ("ratio and KL alone", "ms", False),
    "rl_kernel/grpo_loss/ms": ("clipped loss alone", "ms", False),
    "perf/backward_time": ("backward", "s", False),
    PASS_TIME: ("forward + loss + backward", "s", False),
    "perf/optimizer_time": ("optimizer", "s", False),
    "perf/update_weights_time": ("weights to engines", "s", False),
    "perf/actor_train_time": ("training", "s", False),
    "perf/step_tokens_per_sec": ("tokens, whole step", "tokens/s", True),
    "perf/step_tokens_per_gpu_per_sec": ("tokens, whole step, per GPU", "tokens/s", True),
    "perf/tokens_per_gpu_per_sec": ("rollout, response tokens per GPU", "tokens/s", True),
    "perf/actor_train_tok_per_s": ("training, tokens", "tokens/s", True),
    "perf/trainer_peak_gib": ("trainer, peak memory", "GiB", False),
    "perf/forward_peak_gib": ("forward, peak memory", "GiB", False),
    "perf/policy_loss_peak_gib": ("loss, peak memory", "GiB", False),
    "perf/backward_peak_gib": ("backward, peak memory", "GiB", False),
    "perf/optimizer_peak_gib": ("optimizer, peak memory", "GiB", False),
    "rollout/raw_reward": ("raw_reward", "", True),
    "rollout/response_len/mean": ("response length", "tokens", None),
    "train/train_rollout_logprob_abs_diff": ("train_rollout_logprob_abs_diff", "nats", False),
    "train/ppo_kl": ("KL to the policy that sampled", "nats", None),
    "train/kl_loss": ("KL to the reference", "nats", None),
    "train/loss": ("loss", "", None),
    "train/grad_norm": ("gradient norm", "", None),
    "rl_kernel/fast": ("operators asked to run a kernel that did", "share", None),
}
SPEED_OVER = {
    "perf/step_tokens_per_sec": "perf/step_time",
    "perf/step_tokens_per_gpu_per_sec": "perf/step_time",
    "perf/tokens_per_gpu_per_sec": "perf/rollout_time",
    "perf/actor_train_tok_per_s": "perf/actor_train_time",
}
"""Speed -> the metric with its duration. The mean speed is the total tokens divided by the total seconds."""
TIMES, SPEEDS, SIZES = ("s", "ms"), ("tokens/s",), ("GiB",)
WORDS = {
    **dict.fromkeys(TIMES, ("faster", "slower")),
    **dict.fromkeys(SPEEDS, ("slower", "faster")),
    **dict.fromkeys(SIZES, ("less memory", "more memory")),
}
"""Unit -> the word for a side with the lower value, and the word for a side with the higher value."""
EXCEPTED = (
    *("run_dir", "weight_dir", "tb_experiment_name", "wandb_dir", "wandb_run_id", "notes"),
    *("mlflow_run_name", "mlflow_run_id", "swanlab_experiment_name", "trackio_run_name"),
    *("prometheus_run_name", "prometheus_port"),
)
"""The configuration fields with output folders, names and remarks, which may differ between compared runs. `vime bench`
needs each field to be set in all runs or in none."""
RUN_FLAGS = (
    *("time", "command", "directory", "host.name"),
    *("variables.VIME_RL_KERNEL", "variables.VIME_RLK_FAST", "variables.RL_KERNEL_MODE"),
)
"""The environment fields that comparisons ignore. They differ between any two runs, or they repeat the switch, which
the configuration contains too."""


def config_flags(config: Mapping[str, object]) -> dict[str, Any]:
    """Returns the flags from a run's config.json as one dict without sections. Entries that are no section are left
    out."""
    sections = (section for section in config.values() if isinstance(section, dict))
    return {name: value for section in sections for name, value in section.items()}


def flatten(value: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yields (dotted path, value) for each leaf in nested dicts and in lists that contain dicts."""
    if isinstance(value, Mapping) and (value or not prefix):
        for key, item in value.items():
            yield from flatten(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for i, item in enumerate(value):
            yield from flatten(item, f"{prefix}.{i}")
    else:
        yield prefix, value


def number(value: float, sign: str = "", *, digits: int = 4) -> str:
    """Formats a value with `digits` significant digits, such as 12.35 or 0.1235. A value with more digits before the
    point is rounded to an integer, such as 12,345. A value below 0.001 has at most 3 digits, such as 1.23e-05."""
    if value == 0:
        return "0"
    if abs(float(f"{value:.{digits}g}")) >= 10 ** (digits - 1):
        return f"{value:{sign},.0f}"
    return f"{value:{sign}.{min(digits, 3) - 1}e}" if abs(value) < 1e-3 else f"{value:{sign}.{digits}g}"
