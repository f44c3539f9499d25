"""PPO's clipped surrogate (1707.06347), which GRPO uses. --eps-clip-c also clips tokens of negative advantage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.algo.surrogates.record import Surrogate
from slime.records.errors import FlagError

if TYPE_CHECKING:
    from torch import Tensor

    from slime.algo.token_columns import TokenColumns
    from slime.config.schema import Config


def compute_policy_loss(
    ppo_kl: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float, eps_clip_c: float | None = None
) -> tuple[Tensor, Tensor]:
    """Returns `torch.maximum(-r * A, -r.clamp(1 - eps_clip, 1 + eps_clip_high) * A)` with `r = compute_ratio(-ppo_kl)`.

    With `eps_clip_c` (above 1) the loss of a token with A < 0 is at most `-eps_clip_c * A` (dual clip, 1912.09729).
    The second result is 1.0 where the clip was active. Both results have the shape of `ppo_kl`. PPO: 1707.06347.
    """
    import torch

    from slime.algo.importance import compute_ratio

    ratio = compute_ratio(-ppo_kl)
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    loss = torch.maximum(plain, clipped)
    active = (clipped > plain).float()
    if eps_clip_c is not None:
        if eps_clip_c <= 1:
            raise FlagError("--eps-clip-c", "be above 1", eps_clip_c, "leave it out to turn dual clip off")
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return loss, active


def clipped(c: Config, t: TokenColumns, log_probs: Tensor, ppo_kl: Tensor) -> tuple[Tensor, Tensor]:
    """Calls `compute_policy_loss` with the clips of the flags."""
    clips = c.algorithm.eps_clip, c.algorithm.eps_clip_high, c.algorithm.eps_clip_c
    return compute_policy_loss(ppo_kl, t["advantages"], *clips)


CLIPS = frozenset({"eps_clip", "eps_clip_high", "eps_clip_c"})


def below_one(c: Config) -> None:
    """Raises ValueError for a lower clip at or below a ratio of 0, which never acts. Only CISPO works without a lower
    clip."""
    if c.algorithm.eps_clip >= 1:
        raise FlagError(
            "--eps-clip",
            "be below 1",
            c.algorithm.eps_clip,
            "only --pg-loss-type cispo takes 1 or more, which clips ratios from above alone",
        )


CLIPPED = Surrogate(
    "clip",
    "clipped ratio per token: `max(-ratio_t A_t, -clip(ratio_t) A_t)`",
    clipped,
    source="1707.06347",
    fused=True,
    flags=CLIPS,
    aliases=("ppo", "vanilla", "regular"),
    checks=(below_one,),
)
