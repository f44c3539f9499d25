"""Linear layers that round their input, their weight and the output's gradient to fp8, with gradients.

N rows, K inputs, M outputs, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from rl_kernel.checks import FLOATS, check_tensor, invalid
from rl_kernel.collectives import gather_stack
from rl_kernel.fp8 import reference
from rl_kernel.fp8.kept import rounded_for
from rl_kernel.fp8.reference import GROUP
from rl_kernel.invariant.ranks import start_sum

_LEAST_CAPABILITY = (8, 9)


@cache
def refusal(device: torch.device) -> str | None:
    """Returns the reason why the layers cannot run on a device, or None if they can."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"{device.type} has no kernels"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < _LEAST_CAPABILITY:
        return f"the GPU has compute capability {major}.{minor} and fp8 needs 8.9"
    return None


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    power_of_two: bool = False,
    invariant: bool = False,
    group: dist.ProcessGroup | None = None,
    gather: bool = False,
    weight_grad: Tensor | None = None,
) -> Tensor:
    """Computes `round(x) @ round(weight).T`, with rounding to e4m3 and float32 sums.

    x is rounded in groups of 1 x 128 elements, the weight in blocks of 128 x 128. In the gradients, `round(upstream) @
    round(weight)` and `round(upstream).T @ round(x)`, the groups of 128 elements lie along the summed axis: the
    output's gradient is rounded along its rows for the first product and along its columns for the second.

    Args:
        x: [..., K] in float32, bfloat16 or float16. K is a multiple of 128.
        weight: [M, K] of x's dtype. The last block of rows may have fewer than 128.
        power_of_two: the scales are powers of two (ue8m0).
        invariant: a row's bits do not depend on the other rows. On a host they never do.
        group: the ranks whose gradients of x are added.
        gather: x is this rank's part of the first dimension of the input. Every rank gets all outputs.
        weight_grad: [M, K] float32 buffer (Megatron's `main_grad`), with M a multiple of 128. The backward adds the
            weight's gradient to it, unrounded. Autograd gets undefined values, so that hooks of the weight run.

    Returns:
        [..., M] in the dtype of x, differentiable in x and weight. Saves the weight, and x rounded for the weight's
        gradient. The weight is rounded again in the backward pass, but see `keep_rounded`. Gradients are rounded to x's
        dtype once.

    Raises:
        ValueError: wrong shape, dtype or device.

    Deterministic. Source: DeepSeek-V3, arXiv 2412.19437, section 3.3.
    """
    inputs, rows = x.shape[-1], weight.shape[0]
    total = None if weight_grad is None else (weight_grad.shape, weight_grad.dtype, weight_grad.device)
    key = (inputs, weight.shape, x.dtype, weight.dtype, x.device, weight.device, total)
    missing = -rows % GROUP
    if key not in _passed:
        check_tensor("weight", weight, ["M", inputs], (x.dtype,), device=x.device)
        _check(x, (rows + missing, inputs))
        if weight_grad is not None:
            check_sizes("weight_grad", tuple(weight_grad.shape))
            check_tensor("weight_grad", weight_grad, weight.shape, (torch.float32,), device=weight.device)
        _passed.add(key)
    options = power_of_two, invariant, group, gather and group is not None
    if not missing:
        out: Tensor = _Linear8.apply(x, weight, *options, weight_grad)
        return out
    padded: Tensor = _Linear8.apply(x, pad(weight, (0, 0, 0, missing)), *options, None)
    return padded[..., :-missing]


_passed: set[tuple[object, ...]] = set()
"""The shapes, dtypes and devices that `linear` has checked."""


def check_sizes(name: str, sizes: tuple[int, ...]) -> None:
    """Raises ValueError unless inputs and outputs of a weight are multiples of 128."""
    if any(size % GROUP for size in sizes):
        raise invalid(name, f"be a multiple of {GROUP} on both sides", list(sizes), "leave fp8 out")


def _check(x: Tensor, sizes: tuple[int, int]) -> None:
    check_tensor("x", x, None, FLOATS)
    check_sizes("weight", sizes)
    if reason := refusal(x.device):
        raise invalid("x", "be on a device with fp8", x.device, f"{reason}; compute in bfloat16 there")


@cache
def arithmetic_for(device: torch.device) -> ModuleType:
    """Returns the module with the functions of a device."""
    if device.type == "cpu":
        return reference
    from rl_kernel.fp8 import fast

    return fast


class _Linear8(torch.autograd.Function):
    """Keeps x, rounded for the weight's gradient, until the backward. With `gather`, it keeps this rank's rows of x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        power_of_two: bool,
        invariant: bool,
        group: dist.ProcessGroup | None,
        gather: bool,
        weight_grad: Tensor | None,
    ) -> Tensor:
        arithmetic, lead = arithmetic_for(x.device), x.shape[:-1]
        rows = x.reshape(-1, x.shape[-1])
        rounded, kept = rounded_for(
            weight, lambda turned: arithmetic.round_weights(weight[None], power_of_two, turned=turned)
        )
        ctx.rounded = rounded if kept else None
        ctx.power_of_two, ctx.group, ctx.gather, ctx.lead = power_of_two, group, gather, lead
        ctx.weight_grad = weight_grad
        if ctx.needs_input_grad[1] and not gather:
            out, columns = arithmetic.outputs_and_columns(rows, rounded, None, power_of_two, invariant)
            ctx.save_for_backward(weight, *columns)
        else:
            ctx.save_for_backward(weight, rows)
            if gather:
                rows = gather_stack(rows, group).flatten(0, 1)
            out = arithmetic.outputs(rows, rounded, None, power_of_two, invariant)
        found: Tensor = out.view(-1, *lead[1:], out.shape[-1]) if len(lead) else out[0]
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        arithmetic, power_of_two = arithmetic_for(upstream.device), ctx.power_of_two
        rounded = arithmetic.round_upstream(upstream.reshape(-1, upstream.shape[-1]), None, power_of_two)
        grad, added, grad_weight = None, None, None
        if needs_x:
            weights = ctx.rounded or arithmetic.round_weights(weight[None], power_of_two, plain=False)
            grad = arithmetic.input_gradients(rounded, weights, None, power_of_two)
            if ctx.group is not None:  # the sum over ranks overlaps with the product for the weight
                grad, added = start_sum(grad, ctx.group, scatter=ctx.gather)
        if needs_weight:
            # gather again, so that only this rank's rows are kept from forward to backward
            x = gather_stack(kept[0], ctx.group).flatten(0, 1) if ctx.gather else tuple(kept)
            if ctx.weight_grad is None:
                grad_weight = arithmetic.weight_gradients(rounded, x, None, power_of_two, weight.dtype)[0]
            else:
                arithmetic.add_weight_gradient(rounded, x, power_of_two, ctx.weight_grad)
                grad_weight = torch.empty_like(weight)
        if added is not None:
            added.wait()
        if grad is not None:
            grad = grad.view(*ctx.lead, weight.shape[1])
        return grad, grad_weight, None, None, None, None, None


def round_experts(weights: Sequence[Tensor], power_of_two: bool) -> tuple[object, bool]:
    """Rounds the weights of experts, E tensors [M, K], for `expert_outputs`. Returns the rounded weights, and whether
    `keep_rounded` keeps them. Kept weights also serve `expert_gradients`."""
    first, powers = weights[0], power_of_two
    check_sizes("weight", tuple(first.shape))
    arithmetic = arithmetic_for(first.device)
    return rounded_for(
        first, lambda turned: arithmetic.round_weights(torch.stack(list(weights)), powers, turned=turned)
    )


def expert_outputs(
    x: Tensor, rounded: object, ends: Tensor, *, power_of_two: bool = False, columns: bool = False
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Computes `linear(x[rows of e], weights[e])` per expert e, without gradient.

    x [N, K] has the rows of the experts one after another, `rounded` the weights from `round_experts`, ends int32 [E]
    the end of each expert's rows -> [N, M] in the dtype of x. With `columns`, also returns x rounded for the weights'
    gradients.
    """
    check_tensor("x", x, None, FLOATS)
    arithmetic = arithmetic_for(x.device)
    if columns:
        found: tuple[Tensor, tuple[Tensor, ...]]
        found = arithmetic.outputs_and_columns(x, rounded, ends, power_of_two)
        return found
    return arithmetic.outputs(x, rounded, ends, power_of_two), ()


def expert_gradients(
    upstream: Tensor,
    x: Tensor | tuple[Tensor, ...],
    weights: Sequence[Tensor],
    ends: Tensor,
    *,
    rounded: object = None,
    power_of_two: bool = False,
    of_x: bool = True,
    of_weights: bool = True,
    weight_grads: Sequence[Tensor] = (),
) -> tuple[Tensor | None, Tensor | None]:
    """Computes the gradients of `expert_outputs`: those of x [N, K] and of the weights [E, M, K], if they are wanted. x
    may be rounded already, by `expert_outputs`. `rounded`: the weights from `round_experts` if they were kept.
    With `weight_grads`, E float32 tensors [M, K], the gradients of the weights are added to them, unrounded, and not
    returned.

    The groups of 128 rows for the gradient of a weight are those of its expert's rows alone.
    """
    arithmetic = arithmetic_for(upstream.device)
    gradient = arithmetic.round_upstream(upstream, ends, power_of_two)
    d_x = d_weights = None
    if of_x:
        if rounded is None:
            rounded = arithmetic.round_weights(torch.stack(list(weights)), power_of_two, plain=False)
        d_x = arithmetic.input_gradients(gradient, rounded, ends, power_of_two)
    if of_weights and weight_grads:
        arithmetic.add_expert_gradients(gradient, x, ends, power_of_two, weight_grads)
    elif of_weights:
        d_weights = arithmetic.weight_gradients(gradient, x, ends, power_of_two, weights[0].dtype)
    return d_x, d_weights
