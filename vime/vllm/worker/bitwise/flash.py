"""vLLM's attention on GPUs with `rl_kernel.invariant.paged_attention`, over the cache of FlashAttention."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl

import rl_kernel.invariant as invariant


class PagedFlashAttention(FlashAttentionImpl):
    """Keys and values lie in the cache as [blocks, G, block size, 2 D], a key beside its value."""

    @property
    def strange(self) -> str | None:
        """What of this layer the operator does not compute; None for nothing."""
        parts = {
            "a sliding window": self.sliding_window != (-1, -1),
            "capped scores": bool(self.logits_soft_cap),
            "sinks": self.sinks is not None,
            "ALiBi": self.alibi_slopes is not None,
            "a quantised cache": self.kv_cache_dtype != "auto",
            "a head size that is no power of two": self.head_size & self.head_size - 1 != 0,
        }
        return next((name for name, there in parts.items() if there), None)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        heads = (-1, self.num_heads, self.head_size)
        invariant.paged_attention(
            query.view(heads), keys, values, output.view(heads), attn_metadata.block_table,
            attn_metadata.query_start_loc, attn_metadata.seq_lens, attn_metadata.max_query_len, self.scale,
        )  # fmt: skip
        return output


class InvariantFlashAttention(FlashAttentionBackend):
    """The backend's name and settings are those of vLLM's."""

    @staticmethod
    def get_impl_cls() -> type[PagedFlashAttention]:
        return PagedFlashAttention
