"""Collectives with a fixed order: contributions in rank order, so that all ranks compute the same bits."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def gather_stack(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[P, *value.shape]: `value` of every rank of `group` (P = 1 without one). Shapes must agree."""
    if group is None:
        return value[None]
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, value.contiguous(), group=group)
    return torch.stack(parts)


def rank_sum(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum of `value` over the ranks of `group`, added in rank order."""
    return gather_stack(value, group).sum(0)
