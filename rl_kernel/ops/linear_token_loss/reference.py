"""`linear_token_loss` by `linear_logp`'s reference and autograd: the definition of correct."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rl_kernel.checks import compute_dtype
from rl_kernel.ops.linear_logp.reference import LinearLogp
from rl_kernel.vocab import usable_temperature


def linear_token_loss_reference(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    settings: tuple[Any, ...],
    token_loss: Callable[..., tuple[Tensor, dict[str, Tensor]]],
    with_entropy: bool,
    weight_grad: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Tensor]]:
    """`settings`: targets, temperature, keep_mask, shard, rounding."""
    targets, temperature, keep_mask, shard, rounding = settings
    temperature = usable_temperature(temperature, compute_dtype(hidden, weight, bias))
    layer = weight if weight_grad is None else _AddGradient.apply(weight, weight_grad)
    log_probs, entropy = LinearLogp.apply(
        hidden, layer, bias, targets, temperature, shard, rounding, keep_mask, with_entropy
    )
    loss, metrics = token_loss(log_probs, entropy, slice(0, len(hidden)))
    detached = {name: value.detach() for name, value in metrics.items()}
    return loss, log_probs.detach(), None if entropy is None else entropy.detach(), detached


class _AddGradient(torch.autograd.Function):
    """Identity whose gradient is added to a buffer and goes no further."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, buffer: Tensor) -> Tensor:
        ctx.buffer = buffer
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ctx.buffer.add_(grad)
        return None, None
