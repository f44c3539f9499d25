"""The step keys, the names this project adds to slime's metric names, and the check that a metric is a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

StepKey = Literal["rollout/step", "train/step", "eval/step"]
STEP_KEYS: tuple[str, ...] = get_args(StepKey)

LOGPROB_DIFF = "train/train_rollout_logprob_abs_diff"
LOGPROB_DIFF_MAX = "train/train_rollout_logprob_abs_diff_max"
"""Largest |trainer's - engine's log-prob| over the trained tokens of a step, nats. Not a slime name."""
EXPERTS_DIFFER = "train/routed_experts_differ"
"""With routing replay, the share of pairs of token and layer whose router would have chosen other experts than it was
given. Not a slime name."""


def as_floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Every value as a Python float (NumPy scalars and one-element tensors too); ValueError names others."""
    out = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or isinstance(value, str):
            raise ValueError(f"metric {name!r} must be a name with a number, got {value!r}; log numbers only")
        try:
            out[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"metric {name} must be one number, got {type(value).__name__}; reduce it before logging"
            ) from error
    return out
