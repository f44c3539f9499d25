"""Float32 main weights of bfloat16 weights, stored as the 16 bits that bfloat16 does not have.

    main = bits(weight) * 2**16 + remainder     as integers of 32 bits

A weight is its main weight rounded to the nearest bfloat16 number, so the remainder is from -2**15 to 2**15. The
largest value does not fit into 16 bits. It occurs if a main weight is exactly halfway between two bfloat16 numbers and
was rounded towards zero. `split` then subtracts 1 from the bits of the main weight. If the bits are random, this
happens to one of 131,072 main weights.

Transformer Engine's FusedAdam stores main weights in the same way (`store_param_remainders`), for
--use-precision-aware-optimizer of megatron-core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw

Group: TypeAlias = dict[str, Any]
"""The settings of some weights, and the weights as `params`."""
T = TypeVar("T")
MOMENTS = ("exp_avg", "exp_avg_sq")
LARGEST = 2**15 - 1
DEVICE_SLICE = 2**25
"""Elements whose float32 main weights are on the device at a time, with 8 more bytes each."""


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """Returns the float32 main weights of bfloat16 `weight` with int16 `remainder`, in new memory."""
    bits = weight.view(torch.int16).int()
    return bits.bitwise_left_shift_(16).add_(remainder).view(torch.float32)


def split(main: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Stores float32 `main` in bfloat16 `weight` and int16 `remainder`. Also changes `main`, whose memory it uses."""
    weight.copy_(main)
    bits = weight.view(torch.int16).int().bitwise_left_shift_(16)
    remainder.copy_(main.view(torch.int32).sub_(bits).clamp_(max=LARGEST))


def join_weights(weight: Tensor, remainder: Tensor) -> Tensor:
    """Returns the main weights of `weight` on the host. The device holds one slice at a time."""
    main = torch.empty(weight.shape, dtype=torch.float32)
    for out, *part in zip(*(each.split(DEVICE_SLICE) for each in (main, weight, remainder)), strict=True):
        out.copy_(join(*part))
    return main


def split_weights(main: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Stores `main`, which may be on another device, in `weight` and `remainder`."""
    for values, *part in zip(*(each.split(DEVICE_SLICE) for each in (main, weight, remainder)), strict=True):
        split(values.to(weight.device, torch.float32, copy=True), *part)


def group_by_size(items: Sequence[T], elements: Callable[[T], int], most: int) -> list[list[T]]:
    """Returns lists of consecutive items that have at most `most` elements together. A larger item has a list alone."""
    groups: list[list[T]] = []
    total = 0
    for item in items:
        total += elements(item)
        if groups and total <= most:
            groups[-1].append(item)
        else:
            groups.append([item])
            total = elements(item)
    return groups


def apply_adamw(
    group: Group,
    main: list[Tensor],
    grads: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    steps: list[Tensor],
) -> None:
    """Applies AdamW with the settings of `group` to main weights and moments, and adds 1 to `steps`."""
    beta1, beta2 = group["betas"]
    adamw(
        *(main, grads, first, second, [], steps),
        fused=True,
        amsgrad=False,
        maximize=False,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
    )


class RemainderPart:
    """Bfloat16 weights that are updated on the device, which stores the remainders of their main weights."""

    def __init__(self, owner: torch.optim.Optimizer, group: Group, weights: list[Tensor]) -> None:
        self._group, self._weights = group, weights
        self._states: list[Group] = []
        for weight in weights:
            state: Group = owner.state[weight]
            state.update(
                step=torch.zeros((), device=weight.device),
                exp_avg=torch.zeros_like(weight, dtype=torch.float32),
                exp_avg_sq=torch.zeros_like(weight, dtype=torch.float32),
                master_param=torch.zeros_like(weight, dtype=torch.int16),
            )
            self._states.append(state)

    def take(self) -> None:
        """Makes the main weights equal to the weights."""
        for state in self._states:
            state["master_param"].zero_()

    def update(self) -> None:
        """Updates slices of the weights, in calls with about `DEVICE_SLICE` elements.

        Small weights are joined, so the number of kernels of a call does not depend on the number of weights. The
        experts of a layer have hundreds of weights.
        """
        slices = [
            each
            for weight, state in zip(self._weights, self._states, strict=True)
            for each in self._slices(weight, state)
        ]
        for together in group_by_size(slices, lambda each: each[0].numel(), DEVICE_SLICE):
            weights, remainders, grads, first, second, steps = map(list, zip(*together, strict=True))
            sizes = [weight.numel() for weight in weights]
            main = join(torch.cat(weights), torch.cat(remainders))
            counts = list(torch.stack(steps).unbind())  # copies, because AdamW adds 1 to them for each slice
            grads = [grad.float() for grad in grads]
            apply_adamw(self._group, list(main.split(sizes)), grads, first, second, counts)
            weight, remainder = (
                torch.empty_like(main, dtype=kind) for kind in (weights[0].dtype, torch.int16)
            )
            split(main, weight, remainder)
            torch._foreach_copy_(weights, list(weight.split(sizes)))
            torch._foreach_copy_(remainders, list(remainder.split(sizes)))
        torch._foreach_add_([state["step"] for state in self._states], 1)

    @staticmethod
    def _slices(weight: Tensor, state: Group) -> list[tuple[Tensor, ...]]:
        """Returns slices of a weight, of its remainders, gradients and moments, each with its step count: [elements]
        and []."""
        grad: Tensor = weight.decoupled_grad  # type: ignore[attr-defined]
        tensors = (weight.detach(), state["master_param"], grad, *(state[name] for name in MOMENTS))
        flat = [tensor.view(-1) for tensor in tensors]
        if weight.numel() <= DEVICE_SLICE:  # most weights, and `split` takes ten times as long as `view`
            return [(*flat, state["step"])]
        slices = zip(*(tensor.split(DEVICE_SLICE) for tensor in flat), strict=True)
        return [(*each, state["step"]) for each in slices]
