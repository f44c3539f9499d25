"""SAPO (2511.20347) has a sigmoid gate instead of the clip. The gate is steeper for negative advantages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.algo.surrogates.record import Surrogate

if TYPE_CHECKING:
    from torch import Tensor

    from slime.algo.token_columns import TokenColumns
    from slime.config.schema import Config


def _soft_gate(c: Config, t: TokenColumns, log_probs: Tensor, ppo_kl: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `-(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * A`, where `tau` depends on the sign of A.

    The gradient in the log-prob is `-w * ratio * A`, with `w = 4 p (1 - p)` and p the sigmoid. w is 1 at ratio 1, and
    smaller on both sides. Nothing is clipped.
    """
    import torch

    from slime.algo.importance import compute_ratio

    advantages = t["advantages"]
    tau = torch.where(advantages > 0, c.algorithm.sapo_tau_pos, c.algorithm.sapo_tau_neg)
    gate = torch.sigmoid(tau * (compute_ratio(-ppo_kl) - 1)) * 4 / tau
    return -gate * advantages, torch.zeros_like(ppo_kl)


SAPO_LOSS = Surrogate(
    "sapo",
    "soft gate of the ratio: `-(4 / tau) sigmoid(tau (ratio_t - 1)) A_t`",
    _soft_gate,
    flags=frozenset({"sapo_tau_pos", "sapo_tau_neg"}),
    source="2511.20347",
)
