"""Runs `linear_token_loss` on a device: one step per block of tokens computes gradients from hidden states."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_kernel.ops.linear_logp import kernels
from rl_kernel.ops.linear_logp.arguments import Task
from rl_kernel.ops.linear_logp.autograd import joined, make_head, prepared, record_head, seen_by_autograd
from rl_kernel.ops.linear_logp.head import HeadProblem, Sinks
from rl_kernel.ops.linear_logp.plan import Budget, block_rows, plan
from rl_kernel.ops.linear_token_loss.reference import AGAIN, LossContext, TokenLoss, TokenLossResult


def linear_token_loss_on_device(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    task: Task,
    token_loss: TokenLoss,
    weight_grad: Tensor | None,
) -> TokenLossResult:
    """Runs the operator on a device. Loss, log-probs and entropy are outputs of the autograd function; metrics return
    in a dict."""
    metrics: dict[str, Tensor] = {}
    layer = seen_by_autograd(hidden, weight, bias)
    loss, log_probs, entropy = _OnePass.apply(*layer, task, token_loss, weight_grad, metrics)
    return TokenLossResult(loss, log_probs, entropy, metrics)


class _OnePass(torch.autograd.Function):
    """Autograd function whose forward computes the gradients. The backward only multiplies them by the upstream
    scalar."""

    @staticmethod
    def forward(
        ctx: LossContext,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        task: Task,
        token_loss: TokenLoss,
        weight_grad: Tensor | None,
        metrics: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        problem = prepared(HeadProblem(hidden, weight, bias, task))
        with_entropy, workspace_bytes = task.with_entropy, task.workspace_bytes
        record_head("linear_token_loss", problem)
        grads = _make_gradients(problem, ctx.needs_input_grad, weight_grad)
        costs = make_head(problem).costs(with_entropy)
        sum_bytes = 0 if grads.weight is None else grads.weight.numel() * 4
        # Each block runs its own collectives: processes with different blocks would wait for each other forever.
        size = max(len(hidden), 1)
        if task.shard.even:
            size = block_rows(len(hidden), len(weight), costs, workspace_bytes, sum_bytes)
        total = None
        if size < len(hidden) and grads.weight is not None:
            total = torch.empty_like(grads.weight, dtype=torch.float32)
            workspace_bytes -= sum_bytes
        losses, outputs, found = [], [], []
        for first in range(0, max(len(hidden), 1), size):
            rows = slice(first, min(first + size, len(hidden)))
            sinks = Sinks(
                None if grads.hidden is None else grads.hidden[rows],
                next(
                    (
                        x
                        for x in (weight_grad, total, grads.weight)
                        if x is not None and ctx.needs_input_grad[1]
                    ),
                    None,
                ),
                grads.bias,
                add=weight_grad is not None or first > 0,
            )
            loss, values, extra = _block(
                problem.rows(rows), rows, token_loss, workspace_bytes, with_entropy, sinks
            )
            losses.append(loss)
            outputs.append(values)
            found.append(extra)
        metrics.update({name: joined([extra[name] for extra in found]) for name in found[0]})
        if total is not None and grads.weight is not None:
            grads.weight.copy_(total)
        # Not for save_for_backward: the gradients are neither inputs nor outputs, and the backward hands them over.
        d_bias = None if grads.bias is None or bias is None else grads.bias.to(bias.dtype)
        ctx.grads = grads.hidden, grads.weight, d_bias
        log_probs, entropy = (joined(column) for column in zip(*outputs, strict=True))
        ctx.mark_non_differentiable(*(x for x in (log_probs, entropy) if x is not None))
        ctx.set_materialize_grads(False)
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum(), log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: LossContext, upstream: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if upstream is None:
            return (None,) * 7
        if ctx.grads is None:
            raise RuntimeError(AGAIN)
        grads, ctx.grads = ctx.grads, None
        return *(None if g is None else _scaled(g, upstream) for g in grads), *(None,) * 4


def _make_gradients(problem: HeadProblem, needed: tuple[bool, ...], weight_grad: Tensor | None) -> Sinks:
    """Returns memory for the gradients that autograd expects. The weight gets no memory if `weight_grad` receives its
    gradient."""
    hidden, weight, bias = problem.hidden, problem.weight, problem.bias
    return Sinks(
        torch.empty_like(hidden) if needed[0] else None,
        torch.empty_like(weight) if needed[1] and weight_grad is None else None,
        torch.zeros(bias.shape, device=bias.device) if bias is not None and needed[2] else None,
        add=False,
    )


def _block(
    problem: HeadProblem,
    rows: slice,
    token_loss: TokenLoss,
    workspace_bytes: int,
    with_entropy: bool,
    sinks: Sinks,
) -> tuple[Tensor, tuple[Tensor, Tensor | None], dict[str, Tensor]]:
    """Computes loss, (log_probs, entropy) and metrics of a block. Writes its gradients to the sinks."""
    head = make_head(problem)
    budget = plan(len(problem.hidden), len(problem.weight), head.costs(with_entropy), workspace_bytes)
    wanted = any(sink is not None for sink in (sinks.hidden, sinks.weight, sinks.bias))
    state = head.forward(budget if wanted else Budget(0, budget.kept + budget.tile), with_entropy)
    values = state.log_probs, state.entropy
    log_probs = state.log_probs.detach().requires_grad_(wanted)
    entropy = None if state.entropy is None else state.entropy.detach().requires_grad_(wanted)
    id_log_probs = None if state.id_log_probs is None else state.id_log_probs.detach().requires_grad_(wanted)
    with torch.set_grad_enabled(wanted):
        loss, metrics = token_loss(
            log_probs, entropy, rows, *(() if id_log_probs is None else (id_log_probs,))
        )
    if wanted:
        grad, grad_entropy, grad_ids = _upstream(loss, log_probs, entropy, id_log_probs)
        grad = state.upstream(grad, grad_ids, problem.task)
        if grad is None and grad_entropy is None:
            grad = torch.zeros_like(state.log_probs)
        head.backward(state, budget, sinks, grad, grad_entropy)
    return loss.detach(), values, {name: value.detach() for name, value in metrics.items()}


def _upstream(loss: Tensor, *inputs: Tensor | None) -> list[Tensor | None]:
    """Returns the gradients of the loss in the inputs, or None for an input that is None or that the loss does not
    use."""
    present = [x for x in inputs if x is not None]
    if not loss.requires_grad:
        return [None] * len(inputs)
    found = iter(torch.autograd.grad(loss, present, allow_unused=True))
    grads = [None if x is None else next(found) for x in inputs]
    return [None if g is None else g.contiguous() for g in grads]


def _scaled(grad: Tensor, upstream: Tensor) -> Tensor:
    """Returns `grad * upstream`, in place. For the usual upstream of 1, the launch reads one number and does
    nothing."""
    count = grad.numel()
    if count:
        block = 4096
        kernels._scale_kernel[(triton.cdiv(count, block),)](grad, upstream, count, BLOCK=block)
    return grad
