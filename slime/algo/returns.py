"""Sums over the tokens of a response, which several estimators use. Pure functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def discounted_returns(reward: float, mask: Tensor, kl: Tensor, *, kl_coef: float, gamma: float) -> Tensor:
    """Returns `G_t = x_t + gamma * G_{t+1}` over the trained tokens, and 0 at the other tokens. The rewards are
    `x = -kl_coef * kl`, plus `reward` at the last trained token. As for ppo, the tokens of a tool are not actions and
    discount nothing."""
    trained, x = penalised(reward, mask, kl, kl_coef=kl_coef)
    return x.new_zeros(len(mask)).index_copy(0, trained, discounted_sum(x, gamma))


def penalised(reward: float, mask: Tensor, kl: Tensor, *, kl_coef: float) -> tuple[Tensor, Tensor]:
    """Returns the indices [n] of the n trained tokens in a response, and their rewards [n] fp32: `-kl_coef * kl`, plus
    `reward` at the last trained token."""
    trained = mask.nonzero()[:, 0]
    x = -kl_coef * kl.float()[trained]
    if len(trained):
        x[-1] += reward
    return trained, x


def discounted_sum(x: Tensor, discount: float) -> Tensor:
    """Returns `y_t = x_t + discount * y_{t+1}` along the last dimension, in log2(T) vector steps. The result is fp32,
    or float64 for float64."""
    y = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
    span = 1
    while span < y.shape[-1]:
        # y_t is the sum of span terms, and y_{t+span} is the sum of the next span terms.
        y[..., :-span] += discount**span * y[..., span:].clone()
        span *= 2
    return y


def gae(rewards: Tensor, values: Tensor, gamma: float, lambd: float) -> tuple[Tensor, Tensor]:
    """Computes generalised advantage estimation (1506.02438) along the last dimension. Returns (advantages, advantages
    + values), fp32.

    `delta_t = r_t + gamma * V_{t+1} - V_t` and `A_t = delta_t + gamma * lambd * A_{t+1}`. V and A are 0 after the end.
    """
    next_values = torch.cat([values[..., 1:], torch.zeros_like(values[..., :1])], dim=-1)
    advantages = discounted_sum(rewards + gamma * next_values - values, gamma * lambd)
    return advantages, advantages + values
