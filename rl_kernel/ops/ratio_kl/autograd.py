"""Runs `ratio_kl` by its Triton kernels, with its gradient."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from rl_kernel.autograd import Context
from rl_kernel.ops.masked.blocks import flat
from rl_kernel.ops.ratio_kl import kernels
from rl_kernel.telemetry import timed


class RatioContext(Context, Protocol):
    """Record of a call. terms: the kind of KL, and whether its gradient is unbiased."""

    terms: tuple[str, bool]


class RatioKL(Function):
    """Autograd function of `ratio_kl`. Saves its inputs only, because computing the ratio again in the backward is
    faster than reading it from memory."""

    @staticmethod
    def forward(
        ctx: RatioContext,
        log_probs: Tensor,
        old: Tensor,
        ref: Tensor | None,
        mask: Tensor | None,
        kl_type: str,
        unbiased: bool,
    ) -> tuple[Tensor, Tensor]:
        log_probs, old = flat(log_probs), flat(old)
        ref, mask = (None if value is None else flat(value) for value in (ref, mask))
        ctx.save_for_backward(log_probs, old, ref, mask)
        ctx.terms = (kl_type, unbiased)
        ctx.set_materialize_grads(False)
        ratio, kl = kernels.forward(log_probs, old, ref, mask, kl_type=kl_type, unbiased=unbiased)
        if ref is None:
            ctx.mark_non_differentiable(kl)
        return ratio, kl

    @staticmethod
    @once_differentiable
    def backward(ctx: RatioContext, d_ratio: Tensor | None, d_kl: Tensor | None) -> tuple[Tensor | None, ...]:
        grad = None
        if d_ratio is not None or d_kl is not None:
            kl_type, unbiased = ctx.terms
            log_probs, old, ref, mask = ctx.saved_tensors
            with timed("ratio_kl", log_probs.device):
                grad = kernels.backward(
                    log_probs, old, ref, mask, kl_type=kl_type, unbiased=unbiased, d_ratio=d_ratio, d_kl=d_kl
                )
        return grad, None, None, None, None, None
