"""Process groups and statistics over ranks, for hooks of the training. slime's distributed_utils has these names."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

import rl_kernel
from slime.system.upstream import refused_names

__getattr__ = refused_names("slime.plug_ins.groups")
_gloo: dict[int, dist.ProcessGroup] = {}
"""The group per default group, whose end is also the end of the group."""


def get_gloo_group() -> dist.ProcessGroup:
    """Returns a group of all trainer ranks for tensors and objects on the host.

    The first call makes the group. All ranks must make this call, as for any collective operation. Raises ValueError in
    a process that is no trainer rank.
    """
    if not dist.is_initialized():
        raise ValueError(
            "get_gloo_group must be called on a trainer rank, got a process without ranks; call it in a hook of the "
            "training"
        )
    world = id(dist.group.WORLD)
    if world not in _gloo:
        _gloo.clear()
        _gloo[world] = dist.new_group(backend="gloo")
    return _gloo[world]


def distributed_masked_whiten(
    values: Tensor,
    mask: Tensor,
    process_group: dist.ProcessGroup | None = None,
    shift_mean: bool = True,
    epsilon: float = 1e-8,
) -> Tensor:
    """Returns `(values - mean) * (var + epsilon).rsqrt()` of the counted entries over all ranks of the group, see
    rl_kernel.masked_whiten. `shift_mean=False` adds the mean back."""
    return rl_kernel.masked_whiten(values, mask, group=process_group, eps=epsilon, shift_mean=shift_mean)
