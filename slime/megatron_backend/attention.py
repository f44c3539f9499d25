"""Core attention over packed sequences, and the layout of a packed micro-batch.

Rotary embedding is applied here rather than by Megatron: its packed form slices the frequency table once per sequence
and layer, which for a thousand short sequences costs more than the attention itself.

Shapes: T packed tokens, S sequences, A query heads, G key/value heads, D head size, L padded length of a bucket.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

# torch 2.11 groups heads unasked and has no such argument, later releases want to be told
_VARLEN_GQA = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

_BUCKET_RATIO = 1.5  # longest over shortest sequence of a bucket: bounds the padding, keeps the buckets few


@dataclass
class PackedLayout(PackedSeqParams):
    """Where the sequences of one micro-batch lie in its T tokens. Made by `packed_layout`; shared by all layers.

    `positions` [T] int64 are the places of the tokens in their sequences. `rotary` is the (cos, sin) pair [T, 1, D/2]
    that the model fills in before its layers run. `buckets` lists (S, L) of padded batches that follow each
    other in one buffer of `padded_tokens` rows; `slots` [T] int64 is the row of each token in it.
    """

    lengths: tuple[int, ...] = ()
    positions: Tensor | None = None
    rotary: tuple[Tensor, Tensor] | None = None
    buckets: list[tuple[int, int]] = field(default_factory=list)
    slots: Tensor | None = None
    padded_tokens: int = 0


def packed_layout(lengths: Sequence[int], device: torch.device | str) -> PackedLayout:
    """Layout of sequences of `lengths` tokens that follow each other in one packed row.

    Padding of the row is one more sequence, put last. ValueError for an empty list or a length below 1.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(
            f"lengths must be positive and at least one, got {list(lengths)[:8]}; drop empty sequences"
        )
    sizes = torch.tensor(lengths, dtype=torch.int64)
    ends = sizes.cumsum(0)
    starts = ends - sizes
    total = int(ends[-1])
    positions = torch.arange(total) - starts.repeat_interleave(sizes)
    first_slot, buckets, padded = _buckets(lengths)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(device, torch.int32)
    return PackedLayout(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        lengths=tuple(lengths),
        positions=positions.to(device),
        buckets=buckets,
        slots=(first_slot.repeat_interleave(sizes) + positions).to(device),
        padded_tokens=padded,
    )


def _buckets(lengths: Sequence[int]) -> tuple[Tensor, list[tuple[int, int]], int]:
    """Group sequences of similar length. Returns each sequence's first row in the padded buffer, (S, L) of every
    bucket in buffer order, and the rows of the buffer."""
    members: dict[int, list[int]] = {}
    for sequence, length in enumerate(lengths):
        members.setdefault(math.ceil(math.log(length, _BUCKET_RATIO)), []).append(sequence)
    first = torch.empty(len(lengths), dtype=torch.int64)
    buckets, row = [], 0
    for _, sequences in sorted(members.items()):
        longest = max(lengths[s] for s in sequences)
        first[sequences] = row + longest * torch.arange(len(sequences))
        buckets.append((len(sequences), longest))
        row += len(sequences) * longest
    return first, buckets, row


def apply_rotary(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """`cat(x1 * cos - x2 * sin, x2 * cos + x1 * sin)` for the halves x1, x2 of the last dimension.

    x [T, heads, D]; cos and sin [T, 1, D/2] in fp32, cast to x's dtype. The arrangement HF checkpoints are made for
    (RoFormer, Su et al. 2021).
    """
    cos, sin = (r.to(x.dtype) for r in rotary)
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


def padded_attention(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float) -> Tensor:
    """Causal attention within each sequence: one padded batch of scaled_dot_product_attention per bucket.

    query [T, A, D], key and value [T, G, D] -> [T, A, D]. Padding rows come after a sequence's own tokens, so the
    causal mask alone keeps them out. Deterministic on the CPU.
    """
    buffers = [
        x.new_zeros(layout.padded_tokens, *x.shape[1:]).index_copy(0, layout.slots, x)
        for x in (query, key, value)
    ]
    sections = [sequences * length for sequences, length in layout.buckets]
    outputs = []
    for (sequences, length), *qkv in zip(layout.buckets, *(b.split(sections) for b in buffers), strict=True):
        q, k, v = (x.view(sequences, length, *x.shape[1:]).transpose(1, 2) for x in qkv)
        out = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, layout.slots)


class PackedAttention(nn.Module):
    """Megatron's core-attention slot: rotary embedding, then causal attention over each packed sequence.

    Half precision on CUDA runs torch's variable-length flash attention; everything else the padded form. Grouped
    key/value heads are supported; dropout, sliding windows and attention sinks are not.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **unused: Any) -> None:
        super().__init__()
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedLayout | None = None,
    ) -> Tensor:
        """query [T, A, D], key and value [T, G, D] -> [T, A * D]. `packed_seq_params` must be a PackedLayout."""
        layout = packed_seq_params
        query, key = apply_rotary(query, layout.rotary), apply_rotary(key, layout.rotary)
        if query.is_cuda and query.dtype != torch.float32:
            out = varlen_attn(
                *(query, key, value.contiguous()),
                *(layout.cu_seqlens_q, layout.cu_seqlens_kv, layout.max_seqlen_q, layout.max_seqlen_kv),
                scale=self.scale,
                window_size=(-1, 0),
                **_VARLEN_GQA,
            )
        else:
            out = padded_attention(query, key, value, layout, self.scale)
        return out.flatten(1)
