"""Sums of stacked tensors into separate tensors, in one kernel on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from rl_kernel.dispatch import machine_refusal
from rl_kernel.mode import settings

ALIGNMENT = 16
"""Alignment in bytes of the tensors that a kernel reads by their address."""


def add_stacked(totals: Sequence[Tensor], parts: Tensor) -> None:
    """Computes `total += part` for E tensors of equal shape and the parts [E, ...], which are in float32 or in 16 bits.

    One kernel adds all parts on a GPU if the totals are contiguous float32 tensors whose addresses are multiples of 16
    bytes, and unless the mode is off. Otherwise torch adds one part after another, with the same bits.
    """
    if (
        settings().mode != "off"
        and machine_refusal(parts.device.type) is None
        and parts.is_contiguous()
        and all(is_addressable(total) and total.device == parts.device for total in totals)
    ):
        from rl_kernel.stacked import kernels

        kernels.add_stacked(addresses(totals), parts)
    else:
        torch._foreach_add_(list(totals), list(parts.unbind()))


def is_addressable(total: Tensor) -> bool:
    """Returns True if a kernel can add to `total` by its address."""
    return total.dtype is torch.float32 and total.is_contiguous() and total.data_ptr() % ALIGNMENT == 0


def addresses(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the addresses of tensors, int64 on their device."""
    return _upload(tuple(tensor.data_ptr() for tensor in tensors), tensors[0].device)


@lru_cache(maxsize=4096)
def _upload(found: tuple[int, ...], device: torch.device) -> Tensor:
    """Copies addresses to a device. They stay the same from step to step, unless a buffer moves."""
    pinned = torch.tensor(found, dtype=torch.int64, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)
