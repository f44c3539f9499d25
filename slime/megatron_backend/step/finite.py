"""Checks that log-probs and weights are finite, at the end of what made them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from slime.divergence import DivergedError
from slime.types import TrainData


def require_finite_log_probs(rollout_id: int, data: TrainData) -> None:
    """DivergedError for a log-prob that is not finite. The rollout before this one made the policy's weights."""
    for name in ("ref_log_probs", "old_log_probs"):
        if data.get(name) and not (values := torch.cat(data[name])).isfinite().all():
            bad = values[~values.isfinite()][0].item()
            raise DivergedError(f"{name} must be finite, got {bad} in rollout {rollout_id}", rollout_id - 1)


def require_finite_weights(rollout_id: int, parameters: Iterable[Tensor]) -> None:
    """DivergedError if a weight of this rank is not finite after training the rollout. One pass over the weights."""
    largest = torch.stack(torch._foreach_norm(list(parameters), ord=math.inf)).max()
    if not largest.isfinite():
        raise DivergedError(
            f"weights must be finite, got {largest.item()} after training rollout {rollout_id}", rollout_id
        )
