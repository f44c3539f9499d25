"""Attention of a tower over all images at once: the patches of a frame, or of a window, attend to each other.

transformers' towers call their attention once per frame or window, unless the attention takes all bounds at once. So
this module registers an attention that takes them. On a GPU it is torch's kernel for sequences of several lengths.
Other devices and dtypes compute frames of equal length as one batch.

Shapes: T patches, S frames or windows of L patches, A heads, D head size.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from slime.data.token_slice import ranges
from slime.megatron_backend.model.attention_scores import varlen_attention

NAME = "vime_flash_frames"
"""Name of the attention in transformers' table. With "flash" in its name, transformers passes the bounds."""


def register_frame_attention() -> str:
    """Adds the attention to transformers' table, and returns its name there."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _from_transformers)
    return NAME


def _from_transformers(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int | Tensor,
    dropout: float = 0.0,
    **rest: object,
) -> tuple[Tensor, None]:
    """Computes query, key and value [1, A, T, D] -> [1, T, A, D], as a module of a tower calls it. The bounds of the
    keys are those of the queries."""
    assert attention_mask is None and not dropout, "a tower has no mask and no dropout"
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        longest = int(max_length_q)
        bounds = cu_seq_lens_q.int(), cu_seq_lens_q.int(), longest, longest
        out: Tensor = varlen_attention()(
            q.contiguous(), k.contiguous(), v.contiguous(), *bounds, scale=scaling
        )
        return out[None], None
    return batched_attention(q, k, v, cu_seq_lens_q.tolist(), scaling)[None], None


def batched_attention(q: Tensor, k: Tensor, v: Tensor, bounds: list[int], scale: float) -> Tensor:
    """Computes q, k and v [T, A, D] -> [T, A, D] over the frames between `bounds` [S + 1]. Frames of equal length are
    one batch."""
    members: dict[int, list[int]] = defaultdict(list)
    for start, stop in itertools.pairwise(bounds):
        members[stop - start].append(start)
    parts, rows = [], []
    for length, starts in members.items():
        index = ranges(starts, [length] * len(starts))
        rows.append(index)
        whole = len(members) == 1
        query, key, value = (
            (x if whole else x[index.to(x.device)]).unflatten(0, (-1, length)).transpose(1, 2)
            for x in (q, k, v)
        )
        out = scaled_dot_product_attention(query, key, value, scale=scale)
        parts.append(out.transpose(1, 2).flatten(0, 1))
    if len(parts) == 1:
        return parts[0]
    order = torch.empty(len(q), dtype=torch.int64)
    order[torch.cat(rows)] = torch.arange(len(q))
    return torch.cat(parts)[order.to(q.device)]
