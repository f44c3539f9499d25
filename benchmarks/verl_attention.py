"""Attention of verl's trainer in against_peers.py: torch's flash attention over packed sequences.

verl's default is the package flash-attn, which has no wheel for every torch. verl imports this module
(`actor_rollout_ref.model.external_lib`), and the module registers our trainer's kernel in transformers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import AttentionInterface
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids
from verl_side import ATTENTION

from slime.megatron_backend.model.attention_scores import varlen_attention


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    position_ids: Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Computes query [1, A, T, D], key and value [1, G, T, D] -> [1, T, A, D]. A sequence begins where `position_ids`
    [1, T] are 0."""
    if sliding_window is not None:
        raise ValueError(f"sliding_window must be None, got {sliding_window}; choose a model without windows")
    (bounds, _), (longest, _) = prepare_fa_kwargs_from_position_ids(position_ids)
    q, k, v = (x.squeeze(0).transpose(0, 1).contiguous() for x in (query, key, value))
    most = int(longest)
    out = varlen_attention()(
        *(q, k, v, bounds, bounds, most, most), **{"scale": scaling, "window_size": (-1, 0)}
    )
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION, packed_attention)
