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
    """Returns the reason why the layers cannot run on a device; None if they can."""
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

    Returns:
        [..., M] in the dtype of x, differentiable in x and weight. Saves x and weight only; both are rounded again in
        the backward pass, but see `keep_rounded`. Gradients are rounded to x's dtype once.

    Raises:
        ValueError: wrong shape, dtype or device.

    Deterministic. Source: DeepSeek-V3, arXiv 2412.19437, section 3.3.
    """
    check_tensor("weight", weight, ["M", x.shape[-1]], (x.dtype,), device=x.device)
    outputs = len(weight)
    if missing := -outputs % GROUP:
        weight = pad(weight, (0, 0, 0, missing))
    _check(x, weight)
    out: Tensor = _Linear8.apply(
        x.reshape(-1, x.shape[-1]), weight, power_of_two, invariant, group, gather and group is not None
    )
    out = out[:, :outputs] if missing else out
    return out.reshape(-1, *x.shape[1:-1], outputs) if x.dim() > 1 else out.reshape(outputs)


def check_sizes(name: str, sizes: tuple[int, ...]) -> None:
    """Raises ValueError unless inputs and outputs of a weight are multiples of 128."""
    if any(size % GROUP for size in sizes):
        raise invalid(name, f"be a multiple of {GROUP} on both sides", list(sizes), "leave fp8 out")


def _check(x: Tensor, weight: Tensor) -> None:
    check_tensor("x", x, None, FLOATS)
    check_sizes("weight", tuple(weight.shape[-2:]))
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
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        power_of_two: bool,
        invariant: bool,
        group: dist.ProcessGroup | None,
        gather: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.power_of_two, ctx.group, ctx.gather = power_of_two, group, gather
        if gather:
            x = gather_stack(x, group).flatten(0, 1)
        arithmetic = arithmetic_for(x.device)
        rounded, kept = rounded_for(
            weight, lambda turned: arithmetic.round_weights(weight[None], power_of_two, turned=turned)
        )
        ctx.rounded = rounded if kept else None
        found: Tensor = arithmetic.outputs(x, rounded, None, power_of_two, invariant)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        arithmetic, power_of_two = arithmetic_for(x.device), ctx.power_of_two
        rounded = arithmetic.round_upstream(upstream, None, power_of_two)
        grad, added, grad_weight = None, None, None
        if needs_x:
            weights = ctx.rounded or arithmetic.round_weights(weight[None], power_of_two, plain=False)
            grad = arithmetic.input_gradients(rounded, weights, None, power_of_two)
            if ctx.group is not None:  # the sum over ranks overlaps with the product for the weight
                grad, added = start_sum(grad, ctx.group, scatter=ctx.gather)
        if needs_weight:
            if ctx.gather:  # gather again, so that only this rank's rows are kept from forward to backward
                x = gather_stack(x, ctx.group).flatten(0, 1)
            grad_weight = arithmetic.weight_gradients(rounded, x, None, power_of_two)[0]
        if added is not None:
            added.wait()
        return grad, grad_weight, None, None, None, None


def round_experts(weights: Sequence[Tensor], power_of_two: bool) -> tuple[object, bool]:
    """Rounds the weights of experts, E tensors [M, K], for `expert_outputs`. Returns the rounded weights, and whether
    `keep_rounded` keeps them. Kept weights also serve `expert_gradients`."""
    first, powers = weights[0], power_of_two
    check_sizes("weight", tuple(first.shape))
    arithmetic = arithmetic_for(first.device)
    return rounded_for(
        first, lambda turned: arithmetic.round_weights(torch.stack(list(weights)), powers, turned=turned)
    )


def expert_outputs(x: Tensor, rounded: object, ends: Tensor, *, power_of_two: bool = False) -> Tensor:
    """Computes `linear(x[rows of e], weights[e])` per expert e, without gradient.

    x [N, K] has the rows of the experts one after another, `rounded` the weights from `round_experts`, ends int32 [E]
    the end of each expert's rows -> [N, M] in the dtype of x.
    """
    check_tensor("x", x, None, FLOATS)
    found: Tensor = arithmetic_for(x.device).outputs(x, rounded, ends, power_of_two)
    return found


def expert_gradients(
    upstream: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    ends: Tensor,
    *,
    rounded: object = None,
    power_of_two: bool = False,
    of_x: bool = True,
    of_weights: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """Computes the gradients of `expert_outputs`: those of x [N, K] and of the weights [E, M, K], if they are wanted.
    `rounded`: the weights from `round_experts` if they were kept.

    The groups of 128 rows for the gradient of a weight are those of its expert's rows alone.
    """
    arithmetic = arithmetic_for(x.device)
    gradient = arithmetic.round_upstream(upstream, ends, power_of_two)
    d_x = None
    if of_x:
        if rounded is None:
            rounded = arithmetic.round_weights(torch.stack(list(weights)), power_of_two, plain=False)
        d_x = arithmetic.input_gradients(gradient, rounded, ends, power_of_two)
    return d_x, arithmetic.weight_gradients(gradient, x, ends, power_of_two) if of_weights else None
