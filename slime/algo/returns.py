"""Sums over the tokens of a response that estimators share. Pure functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def discounted_returns(reward: float, mask: Tensor, kl: Tensor, *, kl_coef: float, gamma: float) -> Tensor:
    """`G_t = x_t + gamma * G_{t+1}` over the trained tokens, with `x = -kl_coef * kl`, and `reward` added at the last
    of them; 0 at the other tokens. As for ppo, a tool's tokens are no actions: they discount nothing."""
    trained, x = penalised(reward, mask, kl, kl_coef=kl_coef)
    return x.new_zeros(len(mask)).index_copy(0, trained, discounted_sum(x, gamma))


def penalised(reward: float, mask: Tensor, kl: Tensor, *, kl_coef: float) -> tuple[Tensor, Tensor]:
    """The places of the n trained tokens [n] in a response, and their rewards [n] fp32: `-kl_coef * kl`, and `reward`
    added at the last."""
    trained = mask.nonzero()[:, 0]
    x = -kl_coef * kl.float()[trained]
    if len(trained):
        x[-1] += reward
    return trained, x


def discounted_sum(x: Tensor, discount: float) -> Tensor:
    """`y_t = x_t + discount * y_{t+1}` along the last dimension, in log2(T) vector steps. fp32, except for float64."""
    y = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
    span = 1
    while span < y.shape[-1]:
        # y_t is the sum of span terms, and y_{t+span} is the sum of the next span terms.
        y[..., :-span] += discount**span * y[..., span:].clone()
        span *= 2
    return y


def gae(rewards: Tensor, values: Tensor, gamma: float, lambd: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (1506.02438) along the last dimension: (advantages, advantages + values).

    `delta_t = r_t + gamma * V_{t+1} - V_t` and `A_t = delta_t + gamma * lambd * A_{t+1}`, both 0 after the end; fp32.
    """
    next_values = torch.cat([values[..., 1:], torch.zeros_like(values[..., :1])], dim=-1)
    advantages = discounted_sum(rewards + gamma * next_values - values, gamma * lambd)
    return advantages, advantages + values
