"""Runs `grpo_loss` by its Triton kernels, with its gradient."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from rl_kernel.autograd import Context
from rl_kernel.ops.grpo_loss import kernels
from rl_kernel.ops.grpo_loss.reference import Columns, LossTerms
from rl_kernel.ops.masked.blocks import flat
from rl_kernel.telemetry import timed


class GrpoContext(Context, Protocol):
    """Record of a call. denominator: one number for all tokens, or None if each token has its own. dtypes: those of
    log_probs and entropy."""

    denominator: float | None
    entropy_coef: float
    dtypes: tuple[torch.dtype, torch.dtype | None]


class GrpoLoss(Function):
    """Autograd function of `grpo_loss`. The forward computes the derivative of the loss in log_probs, [N] float32, and
    saves it for the backward."""

    @staticmethod
    def forward(
        ctx: GrpoContext,
        log_probs: Tensor,
        entropy: Tensor | None,
        terms: LossTerms,
        columns: Columns,
        with_slope: bool,
    ) -> tuple[Tensor, ...]:
        columns = columns.map(lambda name, value: flat(value))
        loss, metrics, slope = kernels.forward(terms, columns, with_slope=with_slope)
        divisor = columns.denominators
        ctx.save_for_backward(slope, columns.mask, divisor if isinstance(divisor, Tensor) else None)
        ctx.denominator = None if isinstance(divisor, Tensor) else divisor
        ctx.entropy_coef = terms.entropy_coef
        ctx.dtypes = (log_probs.dtype, None if entropy is None else entropy.dtype)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*metrics.values())
        return loss, *metrics.values()

    @staticmethod
    @once_differentiable
    def backward(ctx: GrpoContext, upstream: Tensor | None, *metrics: None) -> tuple[Tensor | None, ...]:
        grads: list[Tensor | None] = [None, None]
        if upstream is not None:
            slope, mask, denominators = ctx.saved_tensors
            for i in range(2):
                if ctx.needs_input_grad[i]:
                    grads[i] = torch.empty_like(mask, dtype=ctx.dtypes[i])
            divisor = ctx.denominator if denominators is None else denominators
            with timed("grpo_loss", mask.device):
                kernels.backward(upstream, slope, mask, divisor, ctx.entropy_coef, *grads)
        return *grads, None, None, None


def grpo_loss_triton(terms: LossTerms, columns: Columns) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns (loss, metrics) as `grpo_loss` does."""
    entropy = columns.entropy if terms.entropy_coef != 0 else None
    with_slope = torch.is_grad_enabled() and columns.log_probs.requires_grad
    loss, *metrics = GrpoLoss.apply(columns.log_probs, entropy, terms, columns, with_slope)
    return loss, dict(zip(kernels.metric_names(columns), metrics, strict=True))
