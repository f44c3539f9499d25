"""Combines the value of a function with the gradient of another, because the exact operators have no backward.

`with_plain_gradient` computes the other function in the backward. `with_value` takes a result of the other function
that was already computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def with_plain_gradient(
    plain: Callable[..., Tensor], value: Callable[..., Tensor], *tensors: Tensor
) -> Tensor:
    """Returns `value(*tensors)` with the gradient of `plain(*tensors)`, which the backward computes again.

    Both functions must be equal except for rounding. Autograd keeps `tensors` only. The gradient is deterministic if
    the backward of `plain` is.
    """
    if not torch.is_grad_enabled():
        return value(*tensors)
    found: Tensor = _Value.apply(plain, value, *tensors)
    return found


def with_value(plain: Tensor, value: Tensor) -> Tensor:
    """Returns `plain + (value - plain).detach()` with the bits of `value`. Both tensors must be equal except for
    rounding."""
    found: Tensor = _Replaced.apply(plain, value)
    return found


class _Replaced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plain: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream, None


class _Value(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plain: Any, value: Any, *tensors: Tensor) -> Tensor:
        ctx.plain = plain
        ctx.save_for_backward(*tensors)
        result: Tensor = value(*tensors)
        return result

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        inputs = [
            saved.detach().requires_grad_(needed)
            for saved, needed in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        with torch.enable_grad():
            again = ctx.plain(*inputs)
        differentiated = [x for x, needed in zip(inputs, wanted, strict=True) if needed]
        gradients = iter(torch.autograd.grad(again, differentiated, upstream))
        return None, None, *(next(gradients) if needed else None for needed in wanted)
