"""Runs `linear_logp` on a device: the choice of the head, and the autograd function."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_kernel.autograd import Context
from rl_kernel.ops.linear_logp import exp_head
from rl_kernel.ops.linear_logp.arguments import Task
from rl_kernel.ops.linear_logp.exp_head import ExpHead
from rl_kernel.ops.linear_logp.head import HeadProblem, Rows, Sinks, VocabularyHead
from rl_kernel.ops.linear_logp.plain_head import PlainHead
from rl_kernel.ops.linear_logp.plan import Budget, forward_rows, plan
from rl_kernel.telemetry import record_variant, timed
from rl_kernel.token_ids import Top, merge_top
from rl_kernel.vocab import usable_temperature


def make_head(problem: HeadProblem) -> VocabularyHead:
    """Returns the fastest head that takes these inputs. Both heads keep the same contract."""
    return PlainHead(problem) if exp_head.refusal(problem) else ExpHead(problem)


def record_head(operator: str, problem: HeadProblem) -> None:
    """Counts in the telemetry the head that runs a call, and the reason why it is not the fastest."""
    reason = exp_head.refusal(problem)
    record_variant(operator, "exponentials" if reason is None else f"logits: {reason}")


def seen_by_autograd(*tensors: Tensor | None) -> list[Tensor | None]:
    """Returns the tensors, detached where gradients are off. An autograd function sees which inputs require a gradient,
    but not whether gradients are on."""
    return [t if t is None or torch.is_grad_enabled() else t.detach() for t in tensors]


def prepared(problem: HeadProblem) -> HeadProblem:
    """Returns the problem with rows that the kernels can read, and a temperature tensor in float32.

    If the vocabulary is split, all processes must choose the same head, even if one process has another memory
    layout. So rows that the fastest head cannot read in place are copied.
    """
    task = problem.task
    fits = exp_head.readable if task.shard.group is not None else lambda t: t.stride(1) == 1
    hidden, weight = (
        t if fits(t) else t.clone(memory_format=torch.contiguous_format)
        for t in (problem.hidden, problem.weight)
    )
    temperature = usable_temperature(task.temperature, torch.float32)
    if isinstance(temperature, Tensor):
        temperature = temperature.contiguous()
    ready = replace(task, targets=task.targets.contiguous(), temperature=temperature)
    return HeadProblem(hidden, weight, problem.bias, ready)


class HeadContext(Context, Protocol):
    """Record of a call. kept: the tile of the forward, which the first backward takes. extra: the names of the row
    tensors that only this head saves."""

    task: Task
    budget: Budget
    kept: Tensor | None
    extra: tuple[str, ...]


class LinearLogpOnDevice(torch.autograd.Function):
    """Autograd function of `linear_logp`: log-probs [N], entropy [N] and log-probs of the ids [N, K]. The last two are
    None unless requested."""

    @staticmethod
    def forward(
        ctx: HeadContext,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        task: Task,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        problem = prepared(HeadProblem(hidden, weight, bias, task))
        record_head("linear_logp", problem)
        ctx.set_materialize_grads(False)
        if not any(ctx.needs_input_grad):
            return _log_probs_only(problem)
        head = make_head(problem)
        budget = plan(len(hidden), len(weight), head.costs(task.with_entropy), task.workspace_bytes)
        rows = head.forward(budget, task.with_entropy)
        # Not for save_for_backward: the tile is neither input nor output, and the first backward overwrites it.
        ctx.kept = rows.kept
        ctx.save_for_backward(
            hidden, weight, bias, rows.log_probs, rows.lse, rows.entropy, *rows.extra.values()
        )
        ctx.extra, ctx.task, ctx.budget = tuple(rows.extra), task, budget
        return rows.log_probs, rows.entropy, rows.id_log_probs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: HeadContext, grad: Tensor | None, grad_entropy: Tensor | None, grad_ids: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad is None and grad_entropy is None and grad_ids is None:
            return (None,) * 4
        hidden, weight, bias, log_probs, lse, entropy, *extra = ctx.saved_tensors
        head = make_head(prepared(HeadProblem(hidden, weight, bias, ctx.task)))
        rows = Rows(log_probs, lse, entropy, ctx.kept, extra=dict(zip(ctx.extra, extra, strict=True)))
        ctx.kept = None
        grad = rows.upstream(grad, grad_ids, ctx.task)
        sinks = Sinks(
            torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
            if ctx.needs_input_grad[0]
            else None,
            torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
            if ctx.needs_input_grad[1]
            else None,
            torch.zeros(bias.shape, device=bias.device) if ctx.needs_input_grad[2] else None,
            add=False,
        )
        grad, grad_entropy = (g if g is None else g.contiguous() for g in (grad, grad_entropy))
        with timed("linear_logp", hidden.device):
            head.backward(rows, ctx.budget, sinks, grad, grad_entropy)
        d_bias = None if sinks.bias is None else sinks.bias.to(bias.dtype)
        return sinks.hidden, sinks.weight, d_bias, None


def _log_probs_only(problem: HeadProblem) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns log-probs, entropy and log-probs of the ids, without gradients."""
    found = [(rows.log_probs, rows.entropy, rows.id_log_probs) for rows in _forward_only(problem)]
    log_probs, entropy, id_log_probs = (joined(column) for column in zip(*found, strict=True))
    return log_probs, entropy, id_log_probs


def linear_top_on_device(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, task: Task
) -> tuple[Tensor, Top]:
    """Returns the log-probs [N] of the targets, and the `task.top` largest log-probs per token."""
    problem = prepared(HeadProblem(hidden, weight, bias, task))
    record_head("linear_top", problem)
    found = [(rows.log_probs, rows.lse, rows.extra["top_keys"]) for rows in _forward_only(problem)]
    log_probs, lse, keys = (joined(column) for column in zip(*found, strict=True))
    return log_probs, merge_top(keys, lse, task.top, task.shard.group)


def _forward_only(problem: HeadProblem) -> Iterator[Rows]:
    """Yields statistics without gradients, block by block of tokens if the workspace is too small for all tokens.

    Each block runs its own collectives. If the processes' shards differ in size, their blocks might differ too, so
    that all tokens must be in one block.
    """
    task = problem.task
    tokens, columns = len(problem.hidden), len(problem.weight)
    costs = make_head(problem).costs(task.with_entropy)
    size = max(tokens, 1)
    if task.shard.even:
        size = forward_rows(tokens, columns, costs, task.workspace_bytes)
    for first in range(0, max(tokens, 1), size):
        block = problem.rows(slice(first, min(first + size, tokens)))
        budget = plan(len(block.hidden), columns, costs, task.workspace_bytes)
        yield make_head(block).forward(Budget(0, budget.kept + budget.tile), task.with_entropy)


def joined(parts: Sequence[Any]) -> Any:
    """Returns the blocks' tensors as one tensor, or None if the blocks are None."""
    return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat(list(parts))
