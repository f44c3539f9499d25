"""CISPO (2506.13585): the clipped ratio is a constant weight of the log-prob, so clipped tokens keep a gradient.

The paper has no lower clip, which --eps-clip 1 or more turns off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.algo.surrogates.record import Surrogate

if TYPE_CHECKING:
    from torch import Tensor

    from slime.algo.token_columns import TokenColumns
    from slime.config.schema import Config


def compute_cispo_loss(
    ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float
) -> tuple[Tensor, Tensor]:
    """Returns `-r.clamp(1 - eps_clip, 1 + eps_clip_high).detach() * A * log_probs`, and 1.0 where the clip was active
    (2506.13585)."""
    from slime.algo.importance import compute_ratio

    ratio = compute_ratio(-ppo_kl.detach())
    bounded = ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
    return -bounded * advantages * log_probs, (bounded != ratio).float()


def _weighted_log_prob(
    c: Config, t: TokenColumns, log_probs: Tensor, ppo_kl: Tensor
) -> tuple[Tensor, Tensor]:
    clips = c.algorithm.eps_clip, c.algorithm.eps_clip_high
    return compute_cispo_loss(ppo_kl, log_probs, t["advantages"], *clips)


CISPO_LOSS = Surrogate(
    "cispo",
    "clipped ratio as a constant weight of the log-prob: `-clip(ratio_t) A_t log_prob_t`",
    _weighted_log_prob,
    source="2506.13585",
    flags=frozenset({"eps_clip", "eps_clip_high"}),
)
