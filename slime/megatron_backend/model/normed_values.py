"""Attention whose values have a norm without weights (Gemma 4). In one kind of layer, the values are the keys before
their norm, and heads have other sizes than in the rest of the model.

Shapes: P rows of packed tokens, G key/value heads of this rank, D head size.
"""

from __future__ import annotations

import functools
from copy import copy

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import rms_norm

from slime.megatron_backend.model.layers import NormedLinear
from slime.models.decoder import WideHeads

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values: [P, 1, heads, D]."""


def normalise(value: Tensor, eps: float) -> Tensor:
    """Returns `value * rsqrt(mean(value ** 2) + eps)` per head, computed in fp32."""
    normed: Tensor = rms_norm(value.float(), value.shape[-1:], eps=eps).to(value.dtype)
    return normed


class NormedValueAttention(SelfAttention):  # type: ignore[misc]  # megatron-core has no types
    """Megatron's attention with a norm of each head of values."""

    def get_query_key_value_tensors(self, *args: object, **kwargs: object) -> Heads:
        query, key, value = super().get_query_key_value_tensors(*args, **kwargs)
        return query, key, normalise(value, self.config.layernorm_epsilon)


class KeyValueAttention(SelfAttention):  # type: ignore[misc]  # megatron-core has no types
    """Attention with one product for keys and values. `linear_qk` has, per group, the rows of its queries and then of
    its key."""

    def __init__(self, config: TransformerConfig, *args: object, heads: WideHeads, **kwargs: object) -> None:
        own = copy(config)
        own.kv_channels, own.num_query_groups = heads.head_dim, heads.groups
        super().__init__(own, *args, **kwargs)
        self.linear_qk = self.linear_qkv
        del self.linear_qkv

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Heads:
        mixed = self.linear_qk(hidden_states)[0]
        size, groups = self.hidden_size_per_attention_head, self.num_query_groups_per_partition
        by_group = mixed.view(*mixed.shape[:2], groups, -1, size)
        query, key = by_group[..., :-1, :].flatten(2, 3), by_group[..., -1, :]
        value = normalise(key, self.config.layernorm_epsilon)
        return self.q_layernorm(query), self.k_layernorm(key), value


def query_key_product(heads: WideHeads) -> functools.partial[NormedLinear]:
    """Returns the product of queries and keys. Megatron's layer asks for the rows of values too."""
    return functools.partial(_without_values, heads.groups * heads.head_dim)


def _without_values(values: int, hidden: int, rows: int, **settings: object) -> NormedLinear:
    return NormedLinear(hidden, rows - values, **settings)
