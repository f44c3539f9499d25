"""`linear_token_loss` in plain PyTorch, from the reference of `linear_logp` and autograd: the definition of correct."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_kernel.autograd import Context
from rl_kernel.checks import compute_dtype
from rl_kernel.ops.linear_logp.arguments import Task
from rl_kernel.ops.linear_logp.reference import LinearLogp

TokenLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""Maps (log_probs [C], entropy [C] or None, rows) to (sum of these tokens' losses, metrics of [C] each). With
ids, their log-probs [C, K] are a fourth argument."""


class TokenLossResult(NamedTuple):
    """Result of `linear_token_loss`. `loss` is a differentiable float32 scalar. log_probs [N], entropy [N] (None unless
    requested) and the metrics [N] are detached."""

    loss: Tensor
    log_probs: Tensor
    entropy: Tensor | None
    metrics: dict[str, Tensor]


def linear_token_loss_reference(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    task: Task,
    token_loss: TokenLoss,
    weight_grad: Tensor | None,
) -> TokenLossResult:
    """Computes all tokens in one call of `token_loss`. Autograd computes the gradients. The gradient of `weight` is
    added to `weight_grad`, if given."""
    dtype = compute_dtype(hidden, weight, bias)
    takes = weight_grad is not None and weight.requires_grad and torch.is_grad_enabled()
    layer: tuple[Tensor | None, ...] = hidden, weight, bias
    if takes:
        # Make new leaves, with the weight in the compute dtype, so that its gradient is added without a rounding.
        layer = tuple(
            None if x is None else x.detach().requires_grad_(x.requires_grad)
            for x in (hidden, weight.to(dtype), bias)
        )
    log_probs, entropy, id_log_probs = LinearLogp.apply(*layer, task)
    more = () if id_log_probs is None else (id_log_probs,)
    loss, metrics = token_loss(log_probs, entropy, slice(0, len(hidden)), *more)
    loss = loss + log_probs[:0].sum()  # a loss that uses no log-prob has gradients of zero
    if takes and weight_grad is not None:
        leaves = [x if x is not None and x.requires_grad else None for x in layer]
        grads = iter(torch.autograd.grad(loss, [x for x in leaves if x is not None]))
        d_hidden, d_weight, d_bias = (None if x is None else next(grads) for x in leaves)
        assert d_weight is not None
        weight_grad.add_(d_weight)
        loss = _HandOver.apply(hidden, weight, bias, loss.detach(), d_hidden, d_bias)
    elif (
        loss.requires_grad and dtype != torch.float64
    ):  # float64 is for derivative checks, which run the backward several times
        loss = _Once.apply(loss)
    detached = {name: value.detach() for name, value in metrics.items()}
    values = None if entropy is None else entropy.detach()
    return TokenLossResult(loss, log_probs.detach(), values, detached)


AGAIN = (
    "linear_token_loss must be called again for a second backward: the first one took the gradients, which were "
    "computed in the call"
)


class LossContext(Context, Protocol):
    """Record of a call. grads: the gradients of the first arguments; the first backward takes them."""

    grads: tuple[Tensor | None, ...] | None


class _Once(torch.autograd.Function):
    """Autograd function that returns `loss`. A second backward is an error, as on a device, where the first backward
    takes the gradients."""

    @staticmethod
    def forward(ctx: LossContext, loss: Tensor) -> Tensor:
        ctx.grads = ()
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: LossContext, upstream: Tensor) -> Tensor:
        if ctx.grads is None:
            raise RuntimeError(AGAIN)
        ctx.grads = None
        return upstream


class _HandOver(torch.autograd.Function):
    """Autograd function that returns `loss` with the computed gradients of hidden and bias. `weight_grad` already has
    the gradient of the weight."""

    @staticmethod
    def forward(
        ctx: LossContext,
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
    def backward(ctx: LossContext, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError(AGAIN)
        grads, ctx.grads = ctx.grads, None
        return *(None if g is None else g * upstream for g in grads), None, None, None
