"""Runs `logp` by its Triton kernels. The forward reads the logits once; the backward reads them and writes the
gradient."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from rl_kernel.autograd import Context
from rl_kernel.collectives import gather_stack
from rl_kernel.ops.logp.kept_kernels import kept_logits_grad, merge_kept, no_logits, pick_
from rl_kernel.ops.logp.kernels import logits_grad, merge, row_stats
from rl_kernel.ops.logp.reference import LogpTask
from rl_kernel.telemetry import timed


class TritonLogpContext(Context, Protocol):
    task: LogpTask
    inverse: float | Tensor


class TritonLogp(torch.autograd.Function):
    """Autograd function for log-probs [N] and entropy [N] of materialised logits. The entropy is None unless
    requested."""

    @staticmethod
    def forward(
        ctx: TritonLogpContext, logits: Tensor, targets: Tensor, task: LogpTask
    ) -> tuple[Tensor, Tensor | None]:
        shard, kept = task.shard, task.keep
        inverse = 1.0 / task.temperature
        rounding = logits.dtype if task.cap is not None else None  # each step of a cap is rounded
        stats = row_stats(logits, targets, inverse, shard, task.with_entropy, rounding, cap=task.cap)
        if kept is None:
            log_probs, lse, entropy = merge(gather_stack(stats, shard.group))
            whole_lse = z = None
        else:
            z = pick_(no_logits(kept, logits), logits, kept, inverse, shard, rounding, task.cap)
            log_probs, lse, entropy, whole_lse = merge_kept(stats[None], z, kept, targets, shard)
        ctx.save_for_backward(logits, targets, lse, entropy, whole_lse, z)
        ctx.task, ctx.inverse = task, inverse
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: TritonLogpContext, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 3
        logits, targets, lse, entropy, whole_lse, z = ctx.saved_tensors
        task, source = ctx.task, logits.detach()
        out = source if task.in_place else torch.empty_like(logits)
        rounding = logits.dtype if task.cap is not None else None
        into = task.shard, grad_log_probs, grad_entropy, ctx.inverse, out, rounding, task.cap
        with timed("logp", logits.device):
            if task.keep is None:
                logits_grad(source, targets, lse, entropy, *into)
            else:
                kept_logits_grad(source, z, task.keep, targets, lse, whole_lse, entropy, *into)
        if task.in_place:
            increment_version(
                logits
            )  # a second backward would read gradients as logits; this makes it an error
        return out, None, None
