"""Computes vLLM's attention on CPUs with `rl_kernel.invariant.attention` over the paged keys and values.

S requests of one call, T tokens, A query heads, G key heads, D head size, Q and K the most queries and keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

import rl_kernel.invariant as invariant
from vime.vllm.worker.bitwise.paged import Paged


class PagedAttention(Paged, CPUAttentionBackendImpl):
    """Attention over a cache [blocks, G, block size, 2 D], in which each key is followed by its value."""

    def other_differences(self) -> dict[str, bool]:
        return {
            "capped scores": bool(self.logits_soft_cap),
            "a quantised cache": self.is_fp8_kv_cache,
        }

    def do_kv_cache_update(
        self, layer: nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        size, slots = kv_cache.shape[2], slot_mapping.long()
        used = slots >= 0  # the slots of padding tokens are -1
        pair = torch.cat((key, value), -1)[: len(slots)][used]
        kv_cache[slots[used] // size, :, slots[used] % size] = pair

    def attend(self, query: Tensor, kv_cache: Tensor, metadata: Any, output: Tensor) -> None:
        first = metadata.query_start_loc.long()
        queries, keys = first.diff(), metadata.seq_lens.long()
        # Requests with one token and whole prompts are computed separately: padding a token to a prompt would be most
        # of the work.
        for selected in (queries == 1, queries > 1):
            if (chosen := selected.nonzero()[:, 0]).numel():
                window = None if self.sliding_window == -1 else self.sliding_window
                rows, seen, valid = _padded(first[chosen], queries[chosen], keys[chosen], window)
                table = metadata.block_table[chosen].long()
                found = self._attend(query, kv_cache, table, rows, seen, valid)
                output[rows[valid]] = found[valid].view(-1, *output.shape[1:])

    def _attend(
        self, query: Tensor, kv_cache: Tensor, table: Tensor, rows: Tensor, seen: Tensor, valid: Tensor
    ) -> Tensor:
        """Returns [S, Q, A, D] for the rows [S, Q] of the queries."""
        size, position = kv_cache.shape[2], torch.arange(seen.shape[-1], device=query.device)
        pairs = kv_cache[table[:, position // size], :, position % size]  # [S, K, G, 2 D]
        there = seen.any(2).squeeze(1)[..., None, None]  # memory behind a request's keys may hold anything
        key, value = pairs.where(there, 0).transpose(1, 2).chunk(2, -1)
        heads = query.view(-1, self.num_heads, self.head_size)[rows].transpose(1, 2)
        return invariant.attention(heads, key, value, seen, self.scale).transpose(1, 2)


def _padded(
    first: Tensor, queries: Tensor, keys: Tensor, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the row of each query [S, Q], a mask of the keys that it attends to [S, 1, Q, K], and a mask of the
    queries that exist [S, Q]. A request has `queries` tokens from row `first` on, which are the last of its `keys`
    tokens. A query attends to the newest `window` keys up to itself, or to all of them."""
    query_index = torch.arange(int(queries.max()), device=first.device)
    key_index = torch.arange(int(keys.max()), device=first.device)
    there = query_index < queries[:, None]
    last = (keys - queries)[:, None] + query_index
    seen = (key_index <= last[..., None]) & there[..., None]
    if window is not None:
        seen &= key_index > last[..., None] - window
    return torch.where(there, first[:, None] + query_index, 0), seen[:, None], there


class InvariantAttention(CPUAttentionBackend):
    """Attention backend with the name and the settings of vLLM's backend for CPUs."""

    @staticmethod
    def get_impl_cls() -> type[PagedAttention]:
        return PagedAttention


def register() -> None:
    """Makes vLLM use our backend instead of the platform's own. Repeated calls are allowed."""
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{InvariantAttention.__name__}")
    else:
        register_backend(AttentionBackendEnum.FLASH_ATTN, f"{__package__}.flash.InvariantFlashAttention")


def why_not_ours(impl: object) -> str | None:
    """Returns the reason why a vLLM attention does not use our operator, or a feature that our operator does not
    compute, or None."""
    if isinstance(impl, PagedAttention):
        return impl.not_computed
    if not current_platform.is_cpu():
        from vime.vllm.worker.bitwise.flash import PagedFlashAttention

        if isinstance(impl, PagedFlashAttention):
            return impl.not_computed
    return f"attention with {type(impl).__name__}"
