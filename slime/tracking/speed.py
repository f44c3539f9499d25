"""How fast the trainer worked: what it had to compute by the time it took. Pure arithmetic on a step's metrics."""

from __future__ import annotations

from collections.abc import Mapping

FORWARDS = {"log_probs": 1, "ref_log_probs": 1, "actor_train": 3}
"""Timer -> its work in forward passes over all samples. A backward costs two: gradients of inputs and of weights."""


def training_speed(
    perf: Mapping[str, float], *, tokens: int, forward_flops: float, ranks: int
) -> dict[str, float]:
    """perf/{log_probs,ref_log_probs,actor_train}_tflops, in 1e12 FLOPs a second and trainer rank, and
    perf/actor_train_tok_per_s, of all ranks together; for the parts that were timed.

    `perf` are the times of one rank, in seconds; `tokens` and `forward_flops` are of the samples of all ranks (those of
    a RolloutBatch), so the figures are of a rank with the mean share. They are the model's FLOPs: what a rank computes
    twice (recomputation) or in vain (padding) makes them smaller.
    """
    speed = {
        f"perf/{part}_tflops": forwards * forward_flops / ranks / seconds / 1e12
        for part, forwards in FORWARDS.items()
        if (seconds := perf.get(f"perf/{part}_time"))
    }
    if seconds := perf.get("perf/actor_train_time"):
        speed["perf/actor_train_tok_per_s"] = tokens / seconds
    return speed
