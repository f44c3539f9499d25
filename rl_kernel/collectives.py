"""Collectives with a fixed order: they add contributions in rank order, so that all ranks compute the same bits.

The host never waits here. On a device, the stream waits for the other ranks.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def gather_stack(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns `value` of every rank of `group`, stacked to [P, *value.shape] (P = 1 without a group). All ranks must
    pass the same shape."""
    if group is None:
        return value[None]
    stack = value.new_empty((dist.get_world_size(group), *value.shape))
    dist.all_gather(list(stack.unbind(0)), value.contiguous(), group=group)
    return stack


def rank_sum(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the sum of `value` over the ranks of `group`, added in rank order."""
    return gather_stack(value, group).sum(0)
