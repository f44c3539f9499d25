"""What autograd gives to the forward and the backward of an operator."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


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
