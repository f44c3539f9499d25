"""What our attentions of vLLM's platforms share: the call by vLLM, and what of a layer no operator of ours computes."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor


class Paged:
    """In front of a platform's implementation of attention, which keeps its settings."""

    alibi_slopes: Any
    sinks: Any

    @abstractmethod
    def attend(self, query: Tensor, kv_cache: Tensor, metadata: Any, output: Tensor) -> None:
        """Write the attention of `query` over the paged keys and values into `output`, both [T, ...]."""

    @abstractmethod
    def other_differences(self) -> dict[str, bool]:
        """What the platform's implementation spells in its own way: name -> whether this layer has it."""

    @property
    def not_computed(self) -> str | None:
        """What of this layer the operator does not compute; None for nothing."""
        parts = self.other_differences() | {
            "sinks": self.sinks is not None,
            "ALiBi": self.alibi_slopes is not None,
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
        """As vLLM calls it. Keys and values of this call are in the cache already."""
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        self.attend(query, kv_cache, attn_metadata, output)
        return output
