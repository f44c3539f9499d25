"""Megatron's buffers that sum the gradients of weights over micro-batches, for products that add to them.

Megatron's hook adds the gradient that autograd gets, unless the weight is marked. With --overlap-grad-reduce, the hook
also counts the gradients that arrive, so autograd gets one in either case.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def take_main_grads(weights: Sequence[Tensor]) -> list[Tensor]:
    """Returns the float32 buffers of the weights and marks the weights. Returns an empty list if a gradient must reach
    its buffer through autograd."""
    found = [getattr(weight, "main_grad", None) for weight in weights]
    totals = [total for total in found if total is not None and total.dtype is torch.float32]
    if len(totals) < len(weights) or not all(weight.requires_grad for weight in weights):
        return []
    mark_added(weights)
    return totals


def mark_added(weights: Sequence[Tensor]) -> None:
    """Marks weights whose gradients are in Megatron's buffers, so that Megatron's hook drops those of autograd."""
    for weight in weights:
        vars(weight)["grad_added_to_main_grad"] = True
