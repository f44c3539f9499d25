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
    dtype = compute_dtype(hidden, weight, bias)
    takes = weight_grad is not None and weight.requires_grad and torch.is_grad_enabled()
    layer = weight
    if weight_grad is not None:
        # In the compute dtype, so that the gradient is not rounded on its way to the buffer.
        layer = weight.detach().to(dtype).requires_grad_(takes)
    log_probs, entropy = LinearLogp.apply(
        hidden,
        layer,
        bias,
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
        (gradient,) = torch.autograd.grad(loss, layer, retain_graph=True)
        weight_grad.add_(gradient)
    detached = {name: value.detach() for name, value in metrics.items()}
    return loss, log_probs.detach(), None if entropy is None else entropy.detach(), detached
