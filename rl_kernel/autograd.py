"""The interface between `torch.autograd` and an operator's forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

Returned = TypeVar("Returned")


def in_own_dtypes(function: Callable[..., Returned]) -> Callable[..., Returned]:
    """Returns `function` wrapped so that the caller's autocast is off. Autocast would compute the matrix products in a
    dtype other than the operator's."""

    @functools.wraps(function)
    def run(*args: object) -> Returned:
        device = next((x.device.type for x in args if isinstance(x, Tensor)), None)
        if device is None:  # a backward without an upstream gradient computes nothing
            return function(*args)
        with torch.autocast(device, enabled=False):
            return function(*args)

    return run


class Context(Protocol):
    """Interface of autograd's `ctx` object for one call. An operator that saves more than tensors has its own protocol.

    saved_tensors: the arguments of `save_for_backward`. A None among these arguments comes back as None.
    needs_input_grad: one bool per argument of the forward.
    """

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def mark_non_differentiable(self, *outputs: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...
