"""Shared parts of our attentions for vLLM's platforms: the call by vLLM, and the features of a layer that our operators
do not compute."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor


class Paged:
    """Mixin in front of a platform's implementation of attention. It keeps the implementation's settings."""

    alibi_slopes: Any
    sinks: Any

    @abstractmethod
    def attend(self, query: Tensor, kv_cache: Tensor, metadata: Any, output: Tensor) -> None:
        """Writes the attention of `query` over the paged keys and values into `output`, both [T, ...]."""

    @abstractmethod
    def other_differences(self) -> dict[str, bool]:
        """Returns the features that platforms spell differently: name -> True if this layer has the feature."""

    @property
    def not_computed(self) -> str | None:
        """Returns the name of a feature of this layer that the operator does not compute, or None."""
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
        """Computes the attention for one call by vLLM. The keys and values of the call are already in the cache."""
        if attn_metadata is None:  # vLLM profiles memory without metadata
            return output.fill_(0)
        self.attend(query, kv_cache, attn_metadata, output)
        return output
