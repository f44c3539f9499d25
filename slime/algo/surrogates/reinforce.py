"""REINFORCE (Williams, 1992): the log-prob times the advantage, without a ratio."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from slime.algo.surrogates.record import Surrogate

if TYPE_CHECKING:
    from torch import Tensor

    from slime.algo.token_columns import TokenColumns


def _log_prob(args: Namespace, t: TokenColumns, log_probs: Tensor, ppo_kl: Tensor) -> tuple[Tensor, Tensor]:
    """`-A * log_probs`. Nothing is clipped."""
    import torch

    return -t["advantages"] * log_probs, torch.zeros_like(ppo_kl)


REINFORCE_LOSS = Surrogate(
    "reinforce",
    "log-prob times advantage: `-A_t log_prob_t`",
    _log_prob,
    source="Williams, 1992",
    aliases=("gpg",),
)
