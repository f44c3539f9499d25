"""Support for experts that vLLM's CPU build cannot compute: sigmoid scores without groups, and experts that the ranks
of an engine share.

vLLM's router for CPUs accepts sigmoid scores only with groups of experts. Scores without groups are passed as one
group.

vLLM's kernel for CPUs expects all experts in its own process. With --vllm-enable-expert-parallel, a rank has some of
the experts, but the kernel gets every expert's tokens. So the expert ids are mapped to this rank's experts, and a token
of another rank's expert gets weight 0. vLLM adds the outputs of the ranks. Replicas (--vllm-data-parallel-size) must
first exchange tokens, which vLLM's communicator for CPUs does not offer. So each rank writes its tokens into a tensor
of zeros, and the sum over ranks holds all tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter


def with_one_group(init: Callable[..., None]) -> Callable[..., None]:
    """Wraps vLLM's `CPURouter.__init__` so that it treats sigmoid scores without groups as one group."""

    @functools.wraps(init)
    def __init__(self: CPURouter, *args: object, **kwargs: object) -> None:
        init(self, *args, **kwargs)
        if self.scoring_func == "sigmoid" and not self.use_grouped_topk and not self.custom_routing_function:
            self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1

    return __init__


def with_map(apply: Callable[..., object]) -> Callable[..., object]:
    """Wraps vLLM's `CPUUnquantizedExperts.apply` so that it computes this rank's experts for every rank's tokens."""

    @functools.wraps(apply)
    def apply_mapped(
        self: object, *, expert_map: Tensor | None, topk_weights: Tensor, topk_ids: Tensor, **kwargs: object
    ) -> object:
        if expert_map is not None:
            topk_weights, topk_ids = local_choice(expert_map, topk_weights, topk_ids)
        return apply(self, expert_map=None, topk_weights=topk_weights, topk_ids=topk_ids, **kwargs)

    return apply_mapped


def local_choice(expert_map: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Maps global weights fp32 and expert ids [T, topk] to this rank's experts: `where(map[ids] < 0, 0, weights)` and
    `map[ids].clamp(min=0)`.

    expert_map [E] holds the index of each expert on this rank, or -1 for an expert elsewhere.
    """
    local = expert_map[ids.long()]
    return torch.where(local < 0, 0.0, weights), local.clamp(min=0).to(ids.dtype)


def all_gatherv(
    self: DeviceCommunicatorBase, input_: Tensor | list[Tensor], dim: int = 0, sizes: list[int] | None = None
) -> Tensor | list[Tensor]:
    """Returns every rank's rows, `cat([rows of rank 0, ..])`, for a tensor or for each tensor of a list.

    `sizes` has the number of rows per rank. `self` is vLLM's communicator.
    """
    if isinstance(input_, list):
        return [_gathered(self, one, dim, sizes) for one in input_]
    return _gathered(self, input_, dim, sizes)


def _gathered(self: DeviceCommunicatorBase, input_: Tensor, dim: int, sizes: list[int] | None) -> Tensor:
    assert dim == 0
    sizes = sizes or [len(input_)] * self.world_size
    start = sum(sizes[: self.rank_in_group])
    rows = input_.new_zeros(sum(sizes), *input_.shape[1:])
    rows[start : start + len(input_)] = input_
    total: Tensor = self.all_reduce(rows)
    return total


def reduce_scatterv(
    self: DeviceCommunicatorBase, input_: Tensor, dim: int = -1, sizes: list[int] | None = None
) -> Tensor:
    """Returns this rank's rows of the sum over ranks. `sizes` has the number of rows per rank."""
    assert dim == 0
    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    start = sum(sizes[: self.rank_in_group])
    total: Tensor = self.all_reduce(input_.clone())
    return total[start : start + sizes[self.rank_in_group]].contiguous()
