"""The trainer's speed: required work divided by time. Pure arithmetic on a step's metrics."""

from __future__ import annotations

from collections.abc import Mapping

FORWARDS = {"ref_log_probs": 1, "actor_train": 3}
"""Timer -> its work in forward passes over all samples. A backward costs two: for input and weight gradients."""


def training_speed(
    perf: Mapping[str, float],
    *,
    tokens: int,
    forward_flops: float,
    old_flops: float,
    ranks: int,
    ahead_flops: float = 0.0,
) -> dict[str, float]:
    """perf/{log_probs,ref_log_probs,actor_train}_tflops, in 1e12 FLOPs per second per trainer rank, and
    perf/actor_train_tok_per_s over all ranks. Only for parts that were timed.

    `perf` holds the times of one rank in seconds. `tokens` and the FLOPs count the samples of all
    ranks (as in RolloutBatch: shared prompts in `tokens` as often as samples have them), so the result is for a rank
    with the mean share. Only the model's own FLOPs count: recomputation and padding take time and make the speed
    smaller.
    """
    work = {"log_probs": old_flops} | {part: forwards * forward_flops for part, forwards in FORWARDS.items()}
    work["actor_train"] += ahead_flops
    speed = {
        f"perf/{part}_tflops": flops / ranks / seconds / 1e12
        for part, flops in work.items()
        if (seconds := perf.get(f"perf/{part}_time"))
    }
    if seconds := perf.get("perf/actor_train_time"):
        speed["perf/actor_train_tok_per_s"] = tokens / seconds
    return speed
