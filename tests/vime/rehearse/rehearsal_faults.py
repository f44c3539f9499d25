"""Functions of a user with faults that show only when a run generates, scores and trains."""

from __future__ import annotations

import math
from typing import Any

import torch

from slime.rollout.generate import generate


def score(args: Any, sample: Any, **kwargs: Any) -> float:
    """A right reward."""
    return float(len(sample.response) % 2)


def raise_later(args: Any, sample: Any, **kwargs: Any) -> float:
    if sample.index == 5:
        raise KeyError("no such answer")
    return 0.0


def give_text_later(args: Any, sample: Any, **kwargs: Any) -> Any:
    return "right" if sample.index == 5 else 0.0


def give_nan_later(args: Any, sample: Any, **kwargs: Any) -> float:
    return math.nan if sample.index == 5 else 0.0


def drop_all(args: Any, samples: Any, **kwargs: Any) -> bool:
    return False


def raise_in_filter(args: Any, samples: Any, **kwargs: Any) -> bool:
    return samples[0].metadata["difficulty"] > 1


async def mask_too_long(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    sample = await generate(args, sample, sampling_params)
    sample.loss_mask = [1] * (sample.response_length + 1)
    return sample


async def shift_log_probs(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    sample = await generate(args, sample, sampling_params)
    sample.rollout_log_probs = [value - 1.0 for value in sample.rollout_log_probs]
    return sample


async def mask_nothing(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    sample = await generate(args, sample, sampling_params)
    sample.loss_mask = [0] * sample.response_length
    return sample


def spread_badly(args: Any, samples: Any, **kwargs: Any) -> Any:
    """A post-processing of rewards that loses the last sample."""
    rewards = [float(sample.reward) for sample in samples]
    return rewards, rewards[:-1]


def lose_gradient(args: Any, batch: Any, logits: Any, sum_of_sample_mean: Any) -> Any:
    """A loss without gradient."""
    return torch.zeros((), requires_grad=True) * float("nan"), {}


def log_rollout(rollout_id: int, args: Any, samples: Any, extra: Any, time: float) -> bool:
    return args.no_such_flag > 0


def hook_sample(args: Any, sample: Any) -> Any:
    raise RuntimeError("the hook has no connection")
