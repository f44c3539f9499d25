"""Core attention over packed sequences, and the layout of a packed micro-batch.

This module applies the rotary embedding instead of Megatron. Megatron's packed form slices the frequency table once per
sequence and layer, which for a thousand short sequences costs more than the attention.

Shapes: T packed tokens, n tokens of this rank, P rows that it computes (n and padding), S sequences, A query heads, G
key/value heads, D head size, R rotated dimensions of a head, L padded length of a bucket.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn.functional import pad

from rl_kernel import rotary
from slime.data.media.packing import PackedImages
from slime.data.token_slice import TokenSlice, ranges, token_slice
from slime.megatron_backend.context.heads import own_heads, own_rows, whole_sequences
from slime.megatron_backend.model.attention_scores import (
    Bucket,
    FusedBatches,
    Inner,
    SinkAttention,
    band,
    bucket_attention,
    bucket_mask,
    find_obstacle,
    fused_attention,
    fused_batches,
    make_buckets,
    plain_attention,
    split_buckets,
    varlen_attention,
)
from slime.megatron_backend.model.rows import GatheredRows, take
from slime.megatron_backend.model.vision.whole_images import (
    WholeImages,
    attend_to_whole_images,
    find_whole_images,
)
from slime.records.once import warn_once
from slime.system.uploads import upload

log = logging.getLogger(__name__)
_FLASH_DIM = 256  # largest head of the variable-length kernel


class RotaryAngles(NamedTuple):
    """cos and sin of a rotary embedding, fp32 [P, 1, R/2]. `interleaved`: dimension 2 k is paired with 2 k + 1, instead
    of with the other half of R."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False


@dataclass
class PackedLayout(PackedSeqParams):  # type: ignore[misc]  # megatron-core has no types
    """The positions of the sequences in a micro-batch, and the tokens that this rank computes. `packed_layout`
    creates it, and all layers share it.

    `token_indices` [T] int64 are the positions of the row's tokens, and `bounds` [S+1] int32 bounds sequences of
    `lengths`. `positions` [P] int64 are the positions of this rank's tokens in their sequences. The last P - `own` rows
    are padding, 0. `rotary` are rotary embeddings, which the model sets before its layers run. `runs` has the positions
    (start, stop) of the rank's runs of queries, `cu_seqlens_q` bounds them, and `cu_seqlens_kv` bounds the keys that
    each run may see. The padded batches of `buckets` follow each other in one buffer of queries and one of keys.
    `query_slots` [n] and `key_slots` [K] int64 are the rows of the queries and of the keys of every run in these
    buffers.

    `context_group` are the ranks that share the row, or None. With a group, and if sequences share a prompt, `keys`
    reads the K keys of every run, one run after the other, from the ranks' concatenated rows. Otherwise `keys` is
    None and the keys are those of the rank's tokens. `gathered` [T] int64 maps the row's tokens to the concatenated
    rows of the group. `routing`: the experts of the tokens, see `slime.megatron_backend.step.routing_replay`. None if
    the routers choose. `longest`: P of the longest micro-batch among the ranks that exchange tokens of experts, 0 if
    all have the same P. `images`: the images of the rank's tokens, None without images. `whole_images`: the image
    tokens that see the whole image. The first layers add `deep` to their output at the rows `deep_rows`
    (slime.megatron_backend.model.vision.embeddings). `selections`: selected tokens that several layers use, by the
    layer of the indexer.
    """

    own: int = 0
    runs: Sequence[tuple[int, int]] = ()
    lengths: tuple[int, ...] = ()
    token_indices: Tensor = field(kw_only=True)
    bounds: Tensor = field(kw_only=True)
    positions: Tensor = field(kw_only=True)
    rotary: Sequence[RotaryAngles] = ()
    buckets: list[Bucket] = field(default_factory=list)
    query_slots: Tensor = field(kw_only=True)
    key_slots: Tensor = field(kw_only=True)
    context_group: Any = None
    gathered: Tensor | None = None
    keys: GatheredRows | None = None
    routing: Any = None
    longest: int = 0
    images: PackedImages | None = None
    whole_images: WholeImages | None = None
    deep_rows: Tensor | None = None
    deep: tuple[Tensor, ...] = ()
    selections: dict[int, list[Tensor | None]] = field(default_factory=dict)

    def split(self, x: Tensor, *, keys: bool = False) -> list[Tensor]:
        """Maps queries [n, A, D] or keys [K, G, D] to padded batches [S, heads, queries or keys, D], one per bucket."""
        slots, sizes = self.query_slots, [(b.runs, b.queries) for b in self.buckets]
        if keys:
            slots, sizes = self.key_slots, [(b.runs, b.keys) for b in self.buckets]
        return split_buckets(x, slots, sizes)

    @functools.cached_property
    def whole(self) -> PackedLayout:
        """Returns the layout of the row's T tokens on one rank, for layers that exchange heads."""
        return packed_layout(token_slice(self.lengths), self.token_indices.device)

    @functools.cached_property
    def fused(self) -> FusedBatches | None:
        """Returns the batches for cuDNN, or None if they have too much padding."""
        return fused_batches(self.runs, self.token_indices.device)


def packed_layout(
    part: TokenSlice,
    device: torch.device | str,
    context_group: Any = None,
    images: PackedImages | None = None,
) -> PackedLayout:
    """Returns the layout of a rank's part of a packed row. `context_group` has the ranks that share the row."""
    sizes = torch.tensor(part.lengths, dtype=torch.int64)
    starts = sizes.cumsum(0) - sizes
    index = torch.arange(int(sizes.sum())) - starts.repeat_interleave(sizes)
    positions = torch.zeros(part.rows, dtype=torch.int64)
    positions[: len(part.tokens)] = index[part.tokens]
    query_slots, key_slots, buckets = make_buckets(part.runs)
    queries = [run.stop - run.start for run in part.runs]
    seen = [run.stop for run in part.runs]
    layout = PackedLayout(
        qkv_format="thd",
        cu_seqlens_q=upload(_cumulative(queries), device),
        cu_seqlens_kv=upload(_cumulative(seen), device),
        max_seqlen_q=max(queries, default=0),
        max_seqlen_kv=max(seen, default=0),
        own=len(part.tokens),
        runs=[(run.start, run.stop) for run in part.runs],
        lengths=tuple(part.lengths),
        token_indices=upload(index, device),
        bounds=upload(_cumulative(list(part.lengths)), device),
        positions=upload(positions, device),
        buckets=[b if b.mask is None else b._replace(mask=upload(b.mask, device)) for b in buckets],
        query_slots=upload(query_slots, device),
        key_slots=upload(key_slots, device),
        images=images,
        whole_images=None if images is None else find_whole_images(part.runs, images.whole, device),
    )
    if part.size > 1 or part.shares:
        first = starts.tolist()
        keys = part.gathered[ranges([first[run.sequence] for run in part.runs], seen)]
        total = part.size * part.rows if part.size > 1 else len(part.tokens)
        layout.keys = GatheredRows.of(keys, total).to(device)
        if part.size > 1:
            layout.context_group, layout.gathered = context_group, upload(part.gathered, device)
    return layout


def _cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)


def gather_keys(key: Tensor, value: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
    """Maps the keys and values of this rank's tokens [n, G, D] to those of every run, one run after the other [K, G,
    D].

    Backward: each token gets the sum of the gradients over all ranks and all sequences that read it. Collective if
    several ranks share the row.
    """
    if layout.keys is None:
        return key, value
    both = torch.cat([key, value], dim=1)
    if layout.context_group is not None:
        both = gather_from_sequence_parallel_region(padded_rows(both, layout), group=layout.context_group)
    keys, values = take(both, layout.keys).chunk(2, dim=1)
    return keys, values


def padded_rows(x: Tensor, layout: PackedLayout) -> Tensor:
    """Maps [n, ...] to [P, ...] with zeros in the padding rows."""
    padding = layout.positions.numel() - layout.own
    return pad(x, (0, 0) * (x.dim() - 1) + (0, padding)) if padding else x


def rotated(x: Tensor, layout: PackedLayout, number: int | None = 0) -> Tensor:
    """Returns x [P, heads, D] with the first R dimensions of every head rotated by the token's position. `number` is
    the index of the rotary embedding in the layout (None: no rotation).

    Interleaved pairs are returned as two halves. Queries and keys are treated alike, and a dot product does not depend
    on the order.
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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
    inner: Inner | None = None,
) -> Tensor:
    """Computes causal attention within each sequence: one padded batch per bucket, by scaled_dot_product_attention, by
    `plain_attention` with `cap` or `sinks`, or by `inner`. A token sees the newest `window` tokens up to itself (None:
    all tokens).

    query [n, A, D] of this rank's tokens, key and value [K, G, D] of every run -> [n, A, D]. Padding rows follow a
    run's keys, so the causal mask excludes them. Deterministic on the CPU.
    """
    if not layout.own:  # keep the dependency on keys and values, because their backward is a collective
        return query + (key.sum() + value.sum())
    outputs, kv = [], [layout.split(x, keys=True) for x in (key, value)]
    for bucket, q, k, v in zip(layout.buckets, layout.split(query), *kv, strict=True):
        mask = bucket_mask(bucket, window, q.device)
        if inner is not None or cap is not None or sinks is not None:
            seen = band(bucket.keys, bucket.keys, q.device) if mask is None else mask
            if inner is not None:
                out = inner(q, k, v, seen if seen.dim() == 4 else seen.expand(len(q), 1, *seen.shape), scale)
            else:
                out = plain_attention(q, k, v, seen, scale, cap, sinks)
        else:
            out = bucket_attention(q, k, v, mask, scale)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, layout.query_slots)


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes `padded_attention` without a cap, with torch's variable-length kernel. A run of queries sees the keys up
    to its last token.

    key and value [K, G, D]: the keys and values of every run, one run after the other. The kernel's causal mask aligns
    the last query with the last key, also if their numbers differ.
    """
    if not layout.own:  # keep the dependency on keys and values, because their backward is a collective
        return query + (key.sum() + value.sum())
    bounds = (layout.cu_seqlens_q, layout.cu_seqlens_kv, layout.max_seqlen_q, layout.max_seqlen_kv)
    if sinks is not None:
        with_sinks: Tensor = SinkAttention.apply(
            query, key.contiguous(), value.contiguous(), sinks, bounds, scale, window
        )
        return with_sinks
    out = varlen_attention()(
        *(query, key.contiguous(), value.contiguous()),
        *bounds,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
    )
    return cast(Tensor, out)  # a pair only if `return_aux` requests one


class PackedAttention(nn.Module):
    """Megatron's core-attention slot: rotary embedding, then causal attention over each packed sequence.

    Half precision on CUDA uses torch's variable-length flash attention. Other dtypes and devices use the padded form.
    Grouped key/value heads, sliding windows and sinks are supported, and capped scores in the padded form. Dropout is
    not supported. With `attention_backend` fused, layers and micro-batches without an obstacle use cuDNN's kernels. A
    warning reports each obstacle once.

    With context parallelism, `cp_comm_type` chooses one of two ways. "a2a": ranks exchange heads, so that each rank
    computes some heads of all tokens. "all_gather": each rank keeps its queries and gathers all ranks' keys and values
    (Llama 3, 2407.21783, part 3.3.2), which takes as much memory for keys and values as without context parallelism.
    """

    def __init__(
        self,
        config: TransformerConfig,
        softmax_scale: float | None = None,
        *,
        rope: int | None = 0,
        window: int | None = None,
        scale: float | None = None,
        cap: float | None = None,
        sinks: bool = False,
        cp_comm_type: str | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.exchanges_heads = cp_comm_type == "a2a"
        self.rope, self.window, self.cap = rope, window, cap
        self.attend: Callable[..., Tensor] | None = None  # replaces padded_attention (up to `window`)
        self.fused = getattr(config, "attention_backend", None) == AttnBackend.fused
        self.scale = scale or softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.sinks: nn.Parameter | None = None
        if sinks:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.sinks = nn.Parameter(torch.empty(heads))
            split: Any = self.sinks  # the marks are Megatron's
            split.tensor_model_parallel, split.partition_dim, split.partition_stride = True, 0, 1

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
        """Maps query [P, A, D], key and value [P, G, D] to [P, A * D], zeros in padding rows. `packed_seq_params` must
        be a PackedLayout."""
        layout = packed_seq_params
        assert layout is not None
        query, key = rotated(query, layout, self.rope), rotated(key, layout, self.rope)
        group, rows, gathered = layout.context_group, len(query), cast(Tensor, layout.gathered)
        if group is None or not self.exchanges_heads:
            query, key, value = (x[: layout.own] for x in (query, key, value))
            key, value = gather_keys(key, value, layout)
            return padded_rows(self._compute(query, key, value, layout, self.sinks).flatten(1), layout)
        query, key, value = whole_sequences((query, key, value), group, gathered)
        sinks = None if self.sinks is None else own_heads(self.sinks, group)
        return own_rows(self._compute(query, key, value, layout.whole, sinks), group, gathered, rows).flatten(
            1
        )

    def _compute(
        self, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, sinks: Tensor | None
    ) -> Tensor:
        """Computes query [n, A, D], key and value [K, G, D] of every run -> [n, A, D]."""
        fits = self.cap is None and query.shape[-1] <= _FLASH_DIM
        flash = fits and query.is_cuda and query.dtype != torch.float32
        if self.attend is not None:
            out = self.attend(query, key, value, layout, self.scale, self.window)
        elif self.fused and self._can_fuse(query, layout, sinks):
            out = fused_attention(query, key, value, cast(FusedBatches, layout.fused), self.scale)
        elif flash:
            out = flash_attention(query, key, value, layout, self.scale, self.window, sinks)
        else:
            out = padded_attention(query, key, value, layout, self.scale, self.window, self.cap, sinks)
        if layout.whole_images is not None and layout.own:
            settings = (layout.whole_images, self.scale, self.window, self.cap)
            out = attend_to_whole_images(out, query, key, value, *settings, flash=flash)
        return out

    def _can_fuse(self, query: Tensor, layout: PackedLayout, sinks: Tensor | None) -> bool:
        """Returns whether cuDNN's kernels compute this attention. If not, logs the reason."""
        obstacle = find_obstacle(query, self.window, self.cap, sinks)
        if obstacle is None and layout.whole_images is not None:
            obstacle = "tokens see a whole image"
        if obstacle is None and layout.own and layout.fused is None:
            obstacle = "padding would add more than 40% of a micro-batch's pairs of queries and keys"
        if obstacle is not None:
            warn_once(log, obstacle, "--attention-backend fused has no effect where %s", obstacle)
        return obstacle is None and layout.own > 0

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        sinks = {} if self.sinks is None else {"sinks": self.sinks}
        shards: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            sinks, prefix, {"sinks": 0}, sharded_offsets
        )
        return shards
