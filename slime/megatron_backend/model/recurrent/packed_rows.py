"""Functions for all layers with a running state: parameters that ranks split, the convolution before the state, the
exchange of rows between context-parallel ranks, and recomputation.

Shapes: P rows, C channels, W taps, T tokens of the row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu
from torch.utils.checkpoint import checkpoint

from slime.megatron_backend.context.heads import own_rows, whole_sequences
from slime.megatron_backend.model.attention import PackedLayout, padded_rows


def split_over_ranks(*shape: int) -> nn.Parameter:
    """Returns a parameter whose first dimension tensor-parallel ranks split."""
    parameter: Any = nn.Parameter(torch.empty(shape))  # the marks are Megatron's
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, 0, 1
    return parameter  # type: ignore[no-any-return]


def gather_rows(x: Tensor, layout: PackedLayout) -> Tensor:
    """Maps [P, C] of this rank's tokens to [T, C / ranks] of the row's tokens: this context-parallel rank's part of the
    channels. Collective if several ranks share the row."""
    if (group := layout.context_group) is None:
        return x[: layout.own]
    (whole,) = whole_sequences([x.unsqueeze(-1)], group, cast(Tensor, layout.gathered))
    return whole.squeeze(-1)


def return_rows(x: Tensor, layout: PackedLayout) -> Tensor:
    """Reverses `gather_rows`: maps [T, C / ranks] to [P, C], with zeros in padding rows."""
    if (group := layout.context_group) is None:
        return padded_rows(x, layout)
    rows = layout.positions.numel()
    return own_rows(x.unsqueeze(-1), group, cast(Tensor, layout.gathered), rows).squeeze(-1)


def convolved(x: Tensor, weight: Tensor, layout: PackedLayout, bias: Tensor | None = None) -> Tensor:
    """Computes `silu(bias + sum(weight[:, 0, W - 1 - i] * x[t - i] for i in range(W)))` within each sequence: x [T, C],
    weight [C, 1, W], bias [C] -> [T, C]. In fp32."""
    taps = weight[:, 0].float().unbind(-1)[::-1]
    wide, index = x.float(), layout.token_indices[:, None]
    total = wide * taps[0]
    for back, tap in enumerate(taps[1:], 1):
        earlier = pad(wide, (0, 0, back, 0))[: len(x)]
        total = total + torch.where(index >= back, earlier, 0) * tap
    if bias is not None:
        total = total + bias.float()
    return silu(total).to(x.dtype)


def keep_inputs(compute: Callable[..., Tensor], *inputs: object) -> Tensor:
    """Applies `compute`. Only its inputs stay for the backward, which computes everything in between again."""
    if not torch.is_grad_enabled():
        return compute(*inputs)
    made: Tensor = checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=False)
    return made


def for_buckets(compute: Callable[..., Tensor], columns: tuple[Tensor, ...], layout: PackedLayout) -> Tensor:
    """Applies `compute` to padded batches of sequences, one per bucket of the layout: columns [T, A, ...] become
    [B, A, L, ...], and the result [B, A, L, V] becomes [T, A, V]. Padding follows a sequence's tokens, so no token
    reads it."""
    slots, buckets = layout.whole.query_slots, layout.whole.buckets
    sizes = [bucket.runs * bucket.keys for bucket in buckets]
    buffers = [x.new_zeros(sum(sizes), *x.shape[1:]).index_copy(0, slots, x).split(sizes) for x in columns]
    outputs = [
        compute(*(x.unflatten(0, (bucket.runs, -1)).transpose(1, 2) for x in of_bucket))
        for bucket, *of_bucket in zip(buckets, *buffers, strict=True)
    ]
    rows = torch.cat([out.transpose(1, 2).flatten(0, 1) for out in outputs])
    return rows.index_select(0, slots)
