"""Core attention over packed sequences, and the layout of a packed micro-batch.

The rotary embedding is applied here and not by Megatron. Megatron's packed form slices the frequency table once per
sequence and layer, which for a thousand short sequences costs more than the attention.

Shapes: T packed tokens, n tokens of this rank, P rows that it computes (n and padding), S sequences, A query heads,
G key/value heads, D head size, R rotated dimensions of a head, L padded length of a bucket.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from rl_kernel import rotary
from slime.data.token_slice import TokenSlice

# Longest divided by shortest sequence of a bucket. It limits the padding and the number of buckets.
_BUCKET_RATIO = 1.5


class Rotary(NamedTuple):
    """cos and sin of one rotary embedding, fp32 [P, 1, R/2]. `interleaved`: dimension 2 k is paired with 2 k + 1, and
    not with the other half of R."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False


@dataclass
class PackedLayout(PackedSeqParams):  # type: ignore[misc]  # megatron-core has no types
    """The positions of the sequences of one micro-batch, and the tokens that this rank computes. `packed_layout` makes
    it, and all layers share it.

    `places` [T] int64 are the positions of the row's tokens, and `bounds` [S+1] int32 bounds its sequences.
    `positions` [P] int64 are the positions of this rank's tokens in their sequences. The last P - `own` rows are
    padding, 0. `rotary` are the model's rotary embeddings, which it sets before its layers run. `cu_seqlens_q`
    bounds the rank's runs of queries, and `cu_seqlens_kv` the keys that each run may see. `buckets` lists (S, L) of the
    padded batches, which follow each other in one buffer of `padded_tokens` rows. `slots` [T] and `query_slots` [n]
    int64 are the buffer rows of the packed tokens and of this rank's tokens.

    `context_group` are the ranks that share the row. With it, `gathered` [T] has the index of each packed token in the
    concatenated rows of all ranks, and `keys` [K] has the indices of the keys of every run, one run after the other.
    All three are None if one rank computes the row. `routing`: the experts of the tokens, see
    `slime.megatron_backend.routing_replay`. None if the routers choose.
    """

    own: int = 0
    places: Tensor = field(kw_only=True)
    bounds: Tensor = field(kw_only=True)
    positions: Tensor = field(kw_only=True)
    rotary: Sequence[Rotary] = ()
    buckets: list[tuple[int, int]] = field(default_factory=list)
    slots: Tensor = field(kw_only=True)
    query_slots: Tensor = field(kw_only=True)
    padded_tokens: int = 0
    context_group: Any = None
    gathered: Tensor | None = None
    keys: Tensor | None = None
    routing: Any = None


def packed_layout(part: TokenSlice, device: torch.device | str, context_group: Any = None) -> PackedLayout:
    """Layout of a rank's part of a packed row. `context_group`: the ranks that share the row."""
    sizes = torch.tensor(part.lengths, dtype=torch.int64)
    starts = sizes.cumsum(0) - sizes
    place = torch.arange(int(sizes.sum())) - starts.repeat_interleave(sizes)
    positions = torch.zeros(part.rows, dtype=torch.int64)
    positions[: len(part.tokens)] = place[part.tokens]
    first_slot, buckets, padded = _buckets(part.lengths)
    slots = first_slot.repeat_interleave(sizes) + place
    queries = [run.stop - run.start for run in part.runs]
    seen = [run.stop for run in part.runs]
    layout = PackedLayout(
        qkv_format="thd",
        cu_seqlens_q=_cumulative(queries).to(device),
        cu_seqlens_kv=_cumulative(seen).to(device),
        max_seqlen_q=max(queries, default=0),
        max_seqlen_kv=max(seen, default=0),
        own=len(part.tokens),
        places=place.to(device),
        bounds=_cumulative(list(part.lengths)).to(device),
        positions=positions.to(device),
        buckets=buckets,
        slots=slots.to(device),
        query_slots=slots[part.tokens].to(device),
        padded_tokens=padded,
    )
    if part.size > 1:
        first = starts.tolist()
        keys = [torch.arange(first[run.sequence], first[run.sequence] + run.stop) for run in part.runs]
        layout.keys = part.gathered[torch.cat([*keys, torch.empty(0, dtype=torch.int64)])].to(device)
        layout.gathered = part.gathered.to(device)
        layout.context_group = context_group
    return layout


def _cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)


def _buckets(lengths: Sequence[int]) -> tuple[Tensor, list[tuple[int, int]], int]:
    """Group sequences of similar length. Returns each sequence's first row in the padded buffer, (S, L) of every
    bucket in buffer order, and the number of rows of the buffer."""
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


def gather_keys(
    key: Tensor, value: Tensor, layout: PackedLayout, order: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gathers keys and values [n, G, D] of all ranks in `order` (`layout.gathered` or `layout.keys`): [T or K, G, D].

    Backward: each rank gets the sum of all ranks' gradients for its tokens. Collective if several ranks share the row.
    """
    if layout.context_group is None:
        return key, value
    both = torch.cat([key, value], dim=1)
    everyone: Tensor = gather_from_sequence_parallel_region(
        padded_rows(both, layout), group=layout.context_group
    )
    assert order is not None  # `packed_layout` sets both orders with the group
    keys, values = everyone.index_select(0, order).chunk(2, dim=1)
    return keys, values


def padded_rows(x: Tensor, layout: PackedLayout) -> Tensor:
    """[n, ...] -> [P, ...] with zeros in the padding rows."""
    padding = layout.positions.numel() - layout.own
    return pad(x, (0, 0) * (x.dim() - 1) + (0, padding)) if padding else x


def rotated(x: Tensor, layout: PackedLayout, number: int | None = 0) -> Tensor:
    """x [P, heads, D] with the first R dimensions of every head rotated by the token's position. `number` is that of
    the rotary embedding in the layout (None: no rotation).

    Interleaved pairs leave as two halves. Queries and keys do so alike, and a dot product does not see the order.
    """
    if number is None:
        return x
    cos, sin, interleaved = layout.rotary[number]
    size = 2 * cos.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    if interleaved:
        turned = turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    turned = rotary(turned, cos, sin)
    return turned if size == x.shape[-1] else torch.cat((turned, rest), dim=-1)


def padded_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float, window: int | None = None
) -> Tensor:
    """Causal attention within each sequence: one padded batch of scaled_dot_product_attention per bucket. A token sees
    the newest `window` tokens up to itself (None: all).

    query [n, A, D] of this rank's tokens, key and value [T, G, D] of the row -> [n, A, D]. Padding rows follow a
    sequence's tokens, so the causal mask excludes them. Deterministic on the CPU. The queries of other ranks are
    computed with zeros, which costs as much as computing them.
    """
    sizes = [sequences * length for sequences, length in layout.buckets]
    places = (layout.query_slots, layout.slots, layout.slots)
    buffers = [
        x.new_zeros(layout.padded_tokens, *x.shape[1:]).index_copy(0, at, x).split(sizes)
        for x, at in zip((query, key, value), places, strict=True)
    ]
    outputs = []
    for (sequences, length), *qkv in zip(layout.buckets, *buffers, strict=True):
        q, k, v = (x.view(sequences, length, *x.shape[1:]).transpose(1, 2) for x in qkv)
        mask = None if window is None or window >= length else _band(length, window, q.device)
        out = scaled_dot_product_attention(
            *(q, k, v, mask), is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, places[0])


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """Mask [L, L]: query i sees keys i - window + 1 to i."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)


@functools.cache
def _varlen_attention() -> Callable[..., Any]:
    """torch's variable-length kernel with grouped heads. Imported where it is called: it imports the compiler."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 groups heads without this argument; later releases need it
    needs_it = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return functools.partial(varlen_attn, enable_gqa=True) if needs_it else varlen_attn


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float, window: int | None = None
) -> Tensor:
    """`padded_attention` with torch's variable-length kernel. A run of queries sees the keys up to its last token.

    key and value [K, G, D]: the keys and values of every run, one run after the other. The kernel's causal mask aligns
    the last query with the last key, also if their numbers differ.
    """
    if not layout.own:  # keep the dependency on keys and values, because their backward is a collective
        return query + (key.sum() + value.sum())
    out = _varlen_attention()(
        *(query, key.contiguous(), value.contiguous()),
        *(layout.cu_seqlens_q, layout.cu_seqlens_kv, layout.max_seqlen_q, layout.max_seqlen_kv),
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
    )
    return cast(Tensor, out)  # a pair only where `return_aux` asks for one


class PackedAttention(nn.Module):
    """Megatron's core-attention slot: rotary embedding, then causal attention over each packed sequence.

    Half precision on CUDA uses torch's variable-length flash attention. Other dtypes and devices use the padded form.
    Grouped key/value heads and sliding windows are supported. Dropout and attention sinks are not. With context
    parallelism, each rank keeps its queries and gathers the keys and values of all ranks (Llama 3, 2407.21783, part
    3.3.2): two collectives per layer, and as much memory for keys and values as without context parallelism.
    """

    def __init__(
        self,
        config: TransformerConfig,
        softmax_scale: float | None = None,
        *,
        rope: int | None = 0,
        window: int | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.rope, self.window = rope, window
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
        """query [P, A, D], key and value [P, G, D] -> [P, A * D], zeros in padding rows. `packed_seq_params` must be a
        PackedLayout."""
        layout = packed_seq_params
        assert layout is not None
        query, key = rotated(query, layout, self.rope), rotated(key, layout, self.rope)
        query, key, value = (x[: layout.own] for x in (query, key, value))
        flash = query.is_cuda and query.dtype != torch.float32
        key, value = gather_keys(key, value, layout, layout.keys if flash else layout.gathered)
        out = (flash_attention if flash else padded_attention)(
            query, key, value, layout, self.scale, self.window
        )
        return padded_rows(out.flatten(1), layout)
