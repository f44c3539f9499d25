"""CISPO (2506.13585): the clipped ratio is a constant weight of the log-prob, so clipped tokens keep a gradient."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from slime.algo.estimators.record import Estimator, Surrogate, same_for_all_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from slime.algo.token_columns import TokenColumns


def _weighted_log_prob(
    args: Namespace, t: TokenColumns, log_probs: Tensor, ppo_kl: Tensor
) -> tuple[Tensor, Tensor]:
    from slime.algo.surrogates import compute_cispo_loss

    clips = args.eps_clip, args.eps_clip_high
    return compute_cispo_loss(ppo_kl, log_probs, t["advantages"], *clips)


CISPO = Estimator(
    "cispo",
    "`A_t = r`",
    Surrogate("clipped ratio as a constant weight of the log-prob", _weighted_log_prob),
    same_for_all_tokens,
    group="mean and std",
)
