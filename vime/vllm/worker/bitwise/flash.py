"""Computes vLLM's attention on GPUs with `rl_kernel.invariant.paged_attention`, over the cache of FlashAttention."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl

import rl_kernel.invariant as invariant
from vime.vllm.worker.bitwise.paged import Paged


class PagedFlashAttention(Paged, FlashAttentionImpl):
    """Attention over a cache [blocks, G, block size, 2 D], in which each key is followed by its value."""

    def other_differences(self) -> dict[str, bool]:
        return {
            "a window with later keys": self.sliding_window[1] > 0,
            "capped scores": bool(self.logits_soft_cap),
            "a quantised cache": self.kv_cache_dtype != "auto",
            "a head size that is no power of two": self.head_size & self.head_size - 1 != 0,
        }

    def attend(self, query: Tensor, kv_cache: Tensor, metadata: Any, output: Tensor) -> None:
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        heads, before = (-1, self.num_heads, self.head_size), self.sliding_window[0]
        invariant.paged_attention(
            query.view(heads), keys, values, output.view(heads), metadata.block_table,
            metadata.query_start_loc, metadata.seq_lens, metadata.max_query_len, self.scale,
            None if before == -1 else before + 1,  # keys before a query and its own
        )  # fmt: skip


class InvariantFlashAttention(FlashAttentionBackend):
    """Attention backend with the name and the settings of vLLM's backend."""

    @staticmethod
    def get_impl_cls() -> type[PagedFlashAttention]:
        return PagedFlashAttention
