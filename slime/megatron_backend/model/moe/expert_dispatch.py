"""Exchange of tokens between the ranks that share experts: every rank gathers all tokens and computes its own experts.

    hidden [T, H] -> gather [R T, H] -> rows of the local experts [C, H] -> experts -> sums [R T, H] -> reduce-scatter

A token has K experts. If R ranks share the experts and R is at most K, nearly every rank has an expert of nearly every
token. Then a gather moves R - 1 copies of a token, and an all-to-all of rows moves about K. With more ranks, Megatron's
all-to-all dispatcher is used.

The host waits for one number per layer and pass, the rows of its experts, while the gather is running.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import pad

import rl_kernel
from rl_kernel.ops.expert_rows import expert_rows
from slime.megatron_backend.model.attention import PackedLayout


def gathers(core: TransformerConfig) -> bool:
    """Returns whether the ranks that share a layer's experts gather all tokens: if there are at most K ranks for K
    experts per token."""
    if core.num_moe_experts is None:
        return False
    ranks: int = parallel_state.get_expert_tensor_and_model_parallel_world_size()
    return ranks <= int(core.moe_router_topk)


def share_longest(layout: PackedLayout, core: TransformerConfig) -> None:
    """Sets `layout.longest`: the rows of the longest micro-batch among the ranks that gather its tokens.

    Collective over these ranks. The host waits for the device, once per micro-batch.
    """
    same_rows = (
        parallel_state.get_tensor_model_parallel_world_size()
        * parallel_state.get_context_parallel_world_size()
    )
    if not gathers(core) or parallel_state.get_expert_tensor_and_model_parallel_world_size() <= same_rows:
        return
    rows = torch.tensor([len(layout.positions)], device=layout.positions.device)
    group = parallel_state.get_expert_tensor_and_model_parallel_group()
    dist.all_reduce(rows, dist.ReduceOp.MAX, group=group)
    layout.longest = int(rows)


class Chooser(Protocol):
    """The interface of a router."""

    @property
    def chosen(self) -> Tensor:
        """Returns the experts of the last call's tokens, integers [T, K]."""
        ...


class GatheringDispatcher(MoETokenDispatcher):  # type: ignore[misc]  # megatron-core has no types
    """Megatron's interface of a token dispatcher, by `rl_kernel.expert_dispatch` and `expert_combine`.

    `local`: the numbers of this rank's experts, which are consecutive. `router` holds the ids that it has chosen.
    """

    rows: Tensor
    """`expert_rows` of the tokens of all ranks, [R T', K]."""

    def __init__(
        self, local: list[int], router: Chooser, config: TransformerConfig, pg_collection: object
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self._first, self._count, self._router = local[0], len(local), router
        self._padded: tuple[int, int] | None = None

    def prepare(self, layout: PackedLayout) -> None:
        """Prepares the dispatcher for a call with the tokens of `layout`."""
        self._padded = (layout.longest, len(layout.positions)) if layout.longest else None

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Maps hidden [S, B, H] and the router's probs [T, E] to this rank's [T', H] and weights [T', K], with one T'
        >= T on all ranks. Gathers the ids of the experts."""
        self._shape = hidden_states.shape
        hidden = hidden_states.reshape(-1, self._shape[-1])
        ids = self._router.chosen
        weights = probs.gather(1, ids)
        if self._padded is not None:
            longest, own = self._padded
            more = len(hidden) * longest // own - len(
                hidden
            )  # with sequence parallelism a rank has a part of the rows
            hidden, weights, ids = (
                pad(x, (0, 0, 0, more), value=value)
                for x, value in ((hidden, 0.0), (weights, 0.0), (ids, -1))
            )
        with torch.no_grad():
            everywhere = gather_from_sequence_parallel_region(ids.to(torch.int32), group=self.tp_ep_group)
            self.rows, self._counts = expert_rows(everywhere, self._first, self._count)
            self._total = HostNumber(self._counts.sum())
        return hidden, weights

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Gathers all ranks' tokens and weights."""
        weights = gather_from_sequence_parallel_region(probs, group=self.tp_ep_group)
        return gather_from_sequence_parallel_region(hidden_states, group=self.tp_ep_group), weights

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Maps [R T', H] to the rows of the local experts [C, H], rows per expert, weights [C]."""
        rows, weights = rl_kernel.expert_dispatch(hidden_states, probs, self.rows, self._total.value())
        return rows, self._counts, weights

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Maps [C, H] to this rank's part per token sum, [R T', H]."""
        return rl_kernel.expert_combine(hidden_states, self.rows)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Sums the ranks' parts: [R T', H] -> [T', H] of this rank's tokens."""
        combined: Tensor = reduce_scatter_to_sequence_parallel_region(hidden_states, group=self.tp_ep_group)
        return combined

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Maps [T', H] to [S, B, H]."""
        return hidden_states[: self._shape[:-1].numel()].view(self._shape)


class HostNumber:
    """An integer that is being copied from a device to the host. The copy does not wait; `value` waits."""

    def __init__(self, number: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._number = number
        if number.is_cuda:
            self._number = torch.empty((), dtype=number.dtype, pin_memory=True)
            self._number.copy_(number, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def value(self) -> int:
        if self._event is not None:
            self._event.synchronize()
        return int(self._number)
