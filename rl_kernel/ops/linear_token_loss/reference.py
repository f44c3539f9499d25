"""`linear_token_loss` by `linear_logp`'s reference and autograd: the definition of correct."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
    dtype = compute_dtype(hidden, weight, bias)
    takes = weight_grad is not None and weight.requires_grad and torch.is_grad_enabled()
    layer: tuple[Tensor | None, ...] = hidden, weight, bias
    if takes:
        # Leaves of their own; the weight in the compute dtype, so that its gradient is not rounded on the way.
        layer = tuple(
            None if x is None else x.detach().requires_grad_(x.requires_grad)
            for x in (hidden, weight.to(dtype), bias)
        )
    log_probs, entropy = LinearLogp.apply(
        *layer,
        targets,
        usable_temperature(temperature, dtype),
        shard,
        rounding,
        keep_mask,
        with_entropy,
    )
    loss, metrics = token_loss(log_probs, entropy, slice(0, len(hidden)))
    loss = loss + log_probs[:0].sum()  # a loss that uses neither has gradients of zero
    if takes and weight_grad is not None:
        leaves = [x if x is not None and x.requires_grad else None for x in layer]
        grads = iter(torch.autograd.grad(loss, [x for x in leaves if x is not None]))
        d_hidden, d_weight, d_bias = (None if x is None else next(grads) for x in leaves)
        assert d_weight is not None
        weight_grad.add_(d_weight)
        loss = _HandOver.apply(hidden, weight, bias, loss.detach(), d_hidden, d_bias)
    detached = {name: value.detach() for name, value in metrics.items()}
    return loss, log_probs.detach(), None if entropy is None else entropy.detach(), detached


class _HandOver(torch.autograd.Function):
    """`loss`, whose gradients in hidden and bias are known; that of the weight has been taken."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        loss: Tensor,
        d_hidden: Tensor | None,
        d_bias: Tensor | None,
    ) -> Tensor:
        ctx.grads = d_hidden, None, d_bias
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("linear_token_loss must be called again for a second backward")
        grads, ctx.grads = ctx.grads, None
        return *(None if g is None else g * upstream for g in grads), None, None, None
