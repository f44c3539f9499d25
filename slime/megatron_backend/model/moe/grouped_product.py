"""The product of a token with the weight of its expert, for all experts of a layer in one call.

Megatron has one weight per expert, and the product needs one tensor. So the weights are stacked for each product. The
stack is not kept: for the first products of Qwen3-30B-A3B it is 0.75 GiB per layer.

Shapes: E experts, C rows ((token, expert) pairs) sorted by expert, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.functional import grouped_mm

from rl_kernel import fp8
from rl_kernel.stacked import add_stacked
from slime.megatron_backend.model.moe.main_grads import mark_added, take_main_grads
from slime.system.uploads import upload

Rounding = Callable[[Tensor], Tensor]


def expert_ends(shares: Tensor, device: torch.device) -> Tensor:
    """Maps the number of rows per expert, [E] on any device, to the end of each expert's rows, int32 [E] on `device`.

    The host does not wait for the device.
    """
    return upload(shares.cumsum(0, dtype=torch.int32), device)


class GroupedProduct(torch.autograd.Function):
    """`apply(x, ends, *weights)` computes grouped_mm(x, stack(weights).transpose(1, 2), offs=ends), [C, K] -> [C, N].

    Args:
        x: [C, K] in float32, bfloat16 or float16, K and N multiples of 16 bytes. C may be 0, and an expert may have no
            rows.
        ends: int32 [E] from `expert_ends`. Rows ends[e - 1] to ends[e] are multiplied with weight e.
        weights: E tensors [N, K] of x's dtype, contiguous.

    Backward computes d_x and the weight gradients in x's dtype. The gradient of an expert without rows is zero.
    If a weight has a `main_grad` (Megatron's buffer, usually float32), its gradient is added to the buffer after
    rounding to x's dtype, as in Megatron without fused accumulation, and `grad_added_to_main_grad` is set. Autograd
    gets the gradient in either case, because with --overlap-grad-reduce Megatron's hook counts the gradients that
    arrive. The hook drops a gradient whose weight has the mark.

    torch raises RuntimeError for other dtypes or widths, and for a second derivative. For bfloat16 on GPUs of compute
    capability 9 and 10 (torch 2.11), a product is one kernel. Elsewhere, grouped_mm computes one expert after another,
    which is correct but slow; on a GPU, it also waits for `ends`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends, *weights)
        return grouped_mm(x, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return plain_gradients(ctx.saved_tensors, ctx.needs_input_grad, upstream)


class _Rounded(FunctionCtx):
    """The values that the forward pass of `RoundedProduct` keeps."""

    rounding: Rounding
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class RoundedProduct(torch.autograd.Function):
    """`apply(rounding, x, ends, *weights)` computes `GroupedProduct` with the weights `rounding(stack(weights))`.

    The gradient passes the rounding unchanged (straight-through estimator, 1308.3432). `rounding` maps [E, N, K] to the
    same shape and dtype. It runs again in the backward pass, so the rounded weights are not kept.
    """

    @staticmethod
    def forward(ctx: _Rounded, rounding: Rounding, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends, *weights)
        ctx.rounding = rounding
        return grouped_mm(x, rounding(torch.stack(weights)).transpose(1, 2), offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Rounded, upstream: Tensor) -> tuple[Tensor | None, ...]:
        _, *needed = ctx.needs_input_grad
        found = plain_gradients(ctx.saved_tensors, needed, upstream, lambda w: ctx.rounding(torch.stack(w)))
        return None, *found


class _Scaled(FunctionCtx):
    """The values that the forward pass of `Fp8Product` keeps."""

    power_of_two: bool
    adds: bool
    rounded: object
    experts: int
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class Fp8Product(torch.autograd.Function):
    """`apply(power_of_two, adds, x, ends, *weights)` computes `GroupedProduct` in fp8: `rl_kernel.fp8.expert_outputs`.

    K and N are multiples of 128. The gradients are those of `rl_kernel.fp8.expert_gradients`, and reach Megatron's
    buffers as those of `GroupedProduct` do. With `adds`, the product adds them to float32 buffers, unrounded.
    """

    @staticmethod
    def forward(
        ctx: _Scaled, power_of_two: bool, adds: bool, x: Tensor, ends: Tensor, *weights: Tensor
    ) -> Tensor:
        rounded, kept = fp8.round_experts(weights, power_of_two)
        ctx.rounded = rounded if kept else None
        ctx.power_of_two, ctx.adds, ctx.experts = power_of_two, adds, len(weights)
        out, columns = fp8.expert_outputs(
            x, rounded, ends, power_of_two=power_of_two, columns=any(ctx.needs_input_grad[4:])
        )
        ctx.save_for_backward(ends, *weights, *columns)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _Scaled, upstream: Tensor) -> tuple[Tensor | None, ...]:
        ends, *tensors = ctx.saved_tensors
        columns, weights = tuple(tensors[ctx.experts :]), tensors[: ctx.experts]
        needed = ctx.needs_input_grad[2:]
        found = fp8_gradients(
            *(columns, ends, weights, needed, upstream, ctx.power_of_two, ctx.rounded), adds=ctx.adds
        )
        return None, None, *found


def fp8_gradients(
    x: Tensor | tuple[Tensor, ...],
    ends: Tensor,
    weights: list[Tensor],
    needed: Sequence[bool],
    upstream: Tensor,
    power_of_two: bool,
    rounded: object = None,
    adds: bool = False,
) -> tuple[Tensor | None, ...]:
    """Returns `plain_gradients` of products in fp8. x may be rounded already, by `expert_outputs`, and `rounded` has
    the rounded weights if they were kept. With `adds`, the products add the weights' gradients to Megatron's buffers,
    and the returned gradients of the weights have undefined values."""
    needs_x, _, *needs_weights = needed
    totals = take_main_grads(weights) if adds and all(needs_weights) else []
    d_x, d_weights = fp8.expert_gradients(
        *(upstream, x, weights, ends),
        rounded=rounded,
        power_of_two=power_of_two,
        of_x=needs_x,
        of_weights=any(needs_weights),
        weight_grads=totals,
    )
    if totals:
        return d_x, None, *(torch.empty_like(weight) for weight in weights)
    if d_weights is None:
        return d_x, None, *(None for _ in weights)
    _add_to_main_grads(weights, d_weights)
    return d_x, None, *d_weights.unbind()


def plain_gradients(
    saved: Sequence[Tensor],
    needed: Sequence[bool],
    upstream: Tensor,
    stack: Callable[[list[Tensor]], Tensor] = torch.stack,
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of x, ends and the weights, which `saved` has. `stack` returns the weights of the forward
    pass, [E, N, K]."""
    x, ends, *weights = saved
    upstream = upstream.contiguous()  # grouped_mm does not accept an expanded tensor
    of_x, _, *of_weights = needed
    d_x = grouped_mm(upstream, stack(weights), offs=ends) if of_x else None
    if not any(of_weights):
        return d_x, None, *(None for _ in weights)
    d_weights = grouped_mm(upstream.T, x, offs=ends)
    _add_to_main_grads(weights, d_weights)
    return d_x, None, *d_weights.unbind()


def _add_to_main_grads(weights: list[Tensor], gradients: Tensor) -> None:
    """Adds the gradients [E, N, K] to Megatron's buffers if all weights have one. Megatron's hook would add them one
    weight at a time."""
    totals = [total for weight in weights if (total := getattr(weight, "main_grad", None)) is not None]
    if len(totals) == len(weights):
        add_stacked(totals, gradients)
        mark_added(weights)
