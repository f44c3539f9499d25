"""GMPO (2507.20673) takes the geometric mean of clipped ratios instead of the arithmetic mean."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from slime.algo.surrogates.clip import below_one
from slime.algo.surrogates.record import Surrogate

if TYPE_CHECKING:
    from torch import Tensor

    from slime.algo.token_columns import TokenColumns
    from slime.config.schema import Config


def _geometric_mean(c: Config, t: TokenColumns, log_probs: Tensor, ppo_kl: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `-A * exp((mask * d).sum() / mask.sum())` per sequence. `d` is the log-ratio of a token, clipped.

    For A > 0, `d = min(log_ratio, log_ratio.clamp(log(1 - eps_clip), log(1 + eps_clip_high)))`. For A < 0, `d` is the
    maximum of these two numbers. The paper's range (e^-0.4, e^0.4) is --eps-clip 0.33 --eps-clip-high 0.49.
    """
    import torch

    from slime.algo.importance import compute_ratio, sequence_mean

    low, high = math.log(1 - c.algorithm.eps_clip), math.log(1 + c.algorithm.eps_clip_high)
    log_ratio, advantages = -ppo_kl, t["advantages"]
    bounded = log_ratio.clamp(low, high)
    pessimistic = torch.where(
        advantages < 0, torch.maximum(log_ratio, bounded), torch.minimum(log_ratio, bounded)
    )
    mean = sequence_mean(pessimistic, t.mask, t.sample_of_row, len(t.response_lengths))
    return -compute_ratio(mean)[t.sample_of_row] * advantages, (pessimistic != log_ratio).float()


GMPO_LOSS = Surrogate(
    "gmpo",
    "geometric mean of the clipped ratios of a sequence",
    _geometric_mean,
    source="2507.20673",
    whole_sequences=True,
    flags=frozenset({"eps_clip", "eps_clip_high"}),
    aliases=("geo_mean",),
    checks=(below_one,),
)
