"""What autograd gives to the forward and the backward of an operator, and what it takes from the caller."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

Returned = TypeVar("Returned")


def in_own_dtypes(function: Callable[..., Returned]) -> Callable[..., Returned]:
    """`function` without the caller's autocast, which would compute its matrix products in another dtype than the
    operator says."""

    @functools.wraps(function)
    def run(*args: object) -> Returned:
        device = next((x.device.type for x in args if isinstance(x, Tensor)), None)
        if device is None:  # a backward without an upstream gradient computes nothing
            return function(*args)
        with torch.autocast(device, enabled=False):
            return function(*args)

    return run


class Context(Protocol):
    """Of one call. An operator that saves more than tensors has a protocol of its own, with the fields.

    saved_tensors: what `save_for_backward` got. A None among them is a None again.
    needs_input_grad: of each argument of the forward.
    """

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def mark_non_differentiable(self, *outputs: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...
