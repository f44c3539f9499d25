"""Attention over one padded bucket, and attention with a special softmax: learned sinks (gpt-oss) and capped scores
(Gemma 2).

A sink is one learned score per head in the softmax, whose share goes to no token: `softmax([scores, sink])[:-1] @ v`. A
cap makes scores z `cap * tanh(z / cap)`. On GPUs in half precision, sinks run on torch's flash kernel. Caps run in
plain PyTorch on every device, which is correct and slow: it keeps all scores of a sequence.

`fused_attention` runs cuDNN's kernels on batches of equal length. cuDNN also has a packed form, but torch up to 2.13
builds its graph again in every call, because that code only searches the cache of graphs and never fills it
(`run_cudnn_SDP_fprop_nestedtensor` in aten/src/ATen/native/cudnn/MHA.cpp).

Shapes: S sequences of L tokens, T packed tokens, A query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slime.data.token_slice import TokenRun, ranges
from slime.models.fused_attention import find_model_obstacle
from slime.system.uploads import upload

# Longest divided by shortest sequence of a bucket. This ratio limits the padding and the number of buckets.
_BUCKET_RATIO = 1.5

# Most elements of a bucket's mask. Beyond this, unused queries cost less than the mask's memory.
_MASK_ELEMENTS = 2**24

_TILE = 128  # rows of a tile in cuDNN's backward
_MOST_PAIRS = 1.4  # most pairs of a query and a key in cuDNN's batches, per pair that is needed

Inner = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
"""Maps (q [S, A, queries, D], k and v [S, G, keys, D], seen bool [S, 1, queries, keys], scale) to [S, A, queries,
D]."""


class Bucket(NamedTuple):
    """A padded batch of runs: `runs` S, `queries` and `keys` per run with padding. `mask` [S, 1, queries, keys] is True
    for the keys that a query sees. None means a causal mask over equally many queries and keys."""

    runs: int
    queries: int
    keys: int
    mask: Tensor | None = None


def make_buckets(runs: Sequence[TokenRun]) -> tuple[Tensor, Tensor, list[Bucket]]:
    """Groups runs of similar length. Returns the queries' buffer rows, the keys' buffer rows, and the
    buckets in buffer order.

    A run that begins late, such as a response after a shared prompt, has few queries and many keys. A bucket of such
    runs has a mask. In other buckets a query has the same index as its key, after unused queries.
    """
    members: dict[tuple[int, int], list[int]] = {}
    for i, run in enumerate(runs):
        late = 2 * (run.stop - run.start) <= run.stop
        size = _size_class(run.stop - run.start) if late else 0
        members.setdefault((size, _size_class(run.stop)), []).append(i)
    queries, keys = [0] * len(runs), [0] * len(runs)
    buckets, query_row, key_row = [], 0, 0
    for (size, _), of_bucket in sorted(members.items()):
        most = max(runs[i].stop for i in of_bucket)
        few = max(runs[i].stop - runs[i].start for i in of_bucket)
        masked = size > 0 and 2 * few <= most and len(of_bucket) * few * most <= _MASK_ELEMENTS
        bucket = Bucket(len(of_bucket), few if masked else most, most)
        if masked:
            start = torch.tensor([runs[i].start for i in of_bucket]).view(-1, 1, 1, 1)
            bucket = bucket._replace(mask=start + torch.arange(few)[:, None] >= torch.arange(most))
        for index, i in enumerate(of_bucket):
            queries[i] = query_row + index * bucket.queries + (0 if masked else runs[i].start)
            keys[i] = key_row + index * bucket.keys
        query_row += bucket.runs * bucket.queries
        key_row += bucket.runs * bucket.keys
        buckets.append(bucket)
    query_slots = ranges(queries, [run.stop - run.start for run in runs])
    return query_slots, ranges(keys, [run.stop for run in runs]), buckets


def _size_class(length: int) -> int:
    """Returns a size class: 1 for a length of 1, and more for lengths that differ by more than the factor
    `_BUCKET_RATIO`."""
    return 1 + math.ceil(math.log(length, _BUCKET_RATIO))


def split_buckets(x: Tensor, slots: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Maps rows [rows, heads, D] to padded batches [S, heads, L, D]. `sizes` are (S, L) of each batch, and `slots` the
    positions of the rows in all batches. Padding is 0."""
    buffer = x.new_zeros(sum(runs * length for runs, length in sizes), *x.shape[1:]).index_copy(0, slots, x)
    parts = buffer.split([runs * length for runs, length in sizes])
    return [part.unflatten(0, size).transpose(1, 2) for part, size in zip(parts, sizes, strict=True)]


def bucket_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Computes q [S, A, queries, D], k and v [S, G, keys, D] -> [S, A, queries, D]. Without a mask the attention is
    causal."""
    shared = q.shape[1] // k.shape[1]
    if mask is None or mask.dim() == 2:
        return scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=shared > 1
        )
    # The heads of a group become more queries: for few queries on CPUs, a third faster than `enable_gqa`.
    folded = q.unflatten(1, (-1, shared)).flatten(2, 3)
    out = scaled_dot_product_attention(folded, k, v, mask.repeat(1, 1, shared, 1), scale=scale)
    unfolded: Tensor = out.unflatten(2, (shared, -1))
    return unfolded.flatten(1, 2)


def bucket_mask(bucket: Bucket, window: int | None, device: torch.device) -> Tensor | None:
    """Returns the keys that the queries of a bucket see: [S, 1, queries, keys], or [keys, keys] if the bucket has no
    mask. None means a causal mask."""
    if window is None or window >= bucket.keys:
        return bucket.mask
    if bucket.mask is None:
        return band(bucket.keys, window, device)
    index = bucket.mask.sum(-1, keepdim=True) - 1  # index of a query among its keys; it sees keys up to here
    near: Tensor = torch.arange(bucket.keys, device=device) > index - window
    return bucket.mask & near


def band(length: int, window: int, device: torch.device) -> Tensor:
    """Returns a mask [L, L]: query i sees keys i - window + 1 to i."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Computes q [S, A, L, D], k and v [S, G, L, D], mask bool [L, L], sinks [A] -> [S, A, L, D]. The softmax is in
    fp32."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    shares = scores.softmax(-1)[..., : k.shape[2]]
    return shares.to(v.dtype) @ v


@functools.cache
def varlen_attention() -> Callable[..., Any]:
    """Returns torch's variable-length kernel with grouped heads. The import is in the function, because it imports the
    compiler."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 groups heads without this argument; later releases need it
    needs_it = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return functools.partial(varlen_attn, enable_gqa=True) if needs_it else varlen_attn


class SinkAttention(torch.autograd.Function):
    """torch's flash attention over packed sequences with sinks [A]: q [n, A, D], k and v [K, G, D] -> [n, A, D].

    `bounds` are (first rows of the queries, first rows of the keys, most queries, most keys) of the sequences. With `z
    = logaddexp(lse, sink)`, the output is the kernel's output times `exp(lse - z)`. The kernel's backward is correct
    for this output if it gets this output and z instead of the kernel's output and lse. The gradient of a sink is
    `-(exp(sink - z) * (output * d_output).sum(-1)).sum()`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        bounds: tuple[Tensor, Tensor, int, int],
        scale: float,
        window: int | None,
    ) -> Tensor:
        ctx.settings = {
            "scale": scale,
            "window_size_left": -1 if window is None else window - 1,
            "window_size_right": 0,
        }
        ctx.causal = window is None
        plain, lse, rng, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *bounds, 0.0, ctx.causal, False, **ctx.settings
        )
        z = torch.logaddexp(lse, sinks.float()[:, None])
        out: Tensor = (plain * (lse - z).exp().T[..., None]).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, z, rng, unused, *bounds[:2])
        ctx.longest = bounds[2:]
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, z, rng, unused, first_q, first_k = ctx.saved_tensors
        upstream = upstream.contiguous()
        d_q, d_k, d_v = torch.ops.aten._flash_attention_backward(
            *(upstream, q, k, v, out, z, first_q, first_k, *ctx.longest, 0.0, ctx.causal, rng, unused),
            **ctx.settings,
        )
        of_rows = (out.float() * upstream.float()).sum(-1).T
        d_sinks = -((sinks.float()[:, None] - z).exp() * of_rows).sum(-1)
        return d_q, d_k, d_v, d_sinks.to(sinks.dtype), None, None, None


class PaddedRows(NamedTuple):
    """`rows` [padded rows] int64 are the packed rows to read, where padding repeats another row of the run. `slots`
    [packed rows] int64 are their padded rows."""

    rows: Tensor
    slots: Tensor


class FusedBatches(NamedTuple):
    """The runs of a micro-batch as batches of equal length. `sizes`: (runs, length) per batch. `queries` and `keys`
    are None if the packed rows need no padding and no other order."""

    sizes: list[tuple[int, int]]
    queries: PaddedRows | None
    keys: PaddedRows | None


def round_length(length: int) -> int:
    """Returns the padded length of a run: a multiple of 128, with eight steps between 2^n and 2^(n+1) tokens."""
    step = max(_TILE, 1 << max(0, (length - 1).bit_length() - 4))
    return -(-length // step) * step


def plan_batches(lengths: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Yields (padded length, indices of the runs) for each batch of runs with these numbers of keys.

    cuDNN builds a graph for each pair of number and length of runs, which takes time. So the lengths are rounded, and
    the runs of one rounded length are split into batches of 2^n runs.
    """
    members: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        if length:
            members.setdefault(round_length(length), []).append(i)
    for padded, indices in sorted(members.items()):
        while indices:
            count = 1 << (len(indices).bit_length() - 1)
            yield padded, indices[:count]
            indices = indices[count:]


def fused_batches(runs: Sequence[tuple[int, int]], device: torch.device | str) -> FusedBatches | None:
    """Returns the batches for `fused_attention`, or None if they have too much padding. A run (start, stop) has the
    queries of tokens [start, stop) of a sequence, and the keys of [0, stop). The queries before `start` are padding."""
    plan = list(plan_batches([stop for _, stop in runs]))
    pairs = sum(len(members) * padded**2 for padded, members in plan)
    if pairs > _MOST_PAIRS * sum(stop**2 - start**2 for start, stop in runs):
        return None
    starts, stops = (torch.tensor(x, dtype=torch.int64) for x in zip(*runs, strict=True))
    keys = _padded_rows(plan, torch.zeros_like(starts), stops, device)
    queries = _padded_rows(plan, starts, stops, device) if starts.any() else keys
    return FusedBatches([(len(members), padded) for padded, members in plan], queries, keys)


def _padded_rows(
    plan: Sequence[tuple[int, list[int]]], starts: Tensor, stops: Tensor, device: torch.device | str
) -> PaddedRows | None:
    """Returns the padded rows of tokens [start, stop) of each run, or None if these are the packed rows."""
    own = stops - starts
    first = own.cumsum(0) - own
    rows, used = [], []
    for padded, members in plan:
        index = torch.arange(padded)
        begin, end = starts[members, None], stops[members, None]
        rows.append((first[members, None] + torch.clamp(index, begin, end - 1) - begin).flatten())
        used.append(((index >= begin) & (index < end)).flatten())
    order, tokens = torch.cat(rows), int(own.sum())
    if len(order) == tokens and torch.equal(order, torch.arange(tokens)):
        return None
    slots, at = torch.empty(tokens, dtype=torch.int64), torch.cat(used).nonzero().flatten()
    slots[order[at]] = at
    return PaddedRows(upload(order, device), upload(slots, device))


class _Saved(Protocol):
    slots: Tensor | None
    total: int


class _Pad(torch.autograd.Function):
    """Maps packed rows to padded rows. Backward: the gradients of padding are 0 and are dropped."""

    @staticmethod
    def forward(ctx: _Saved, x: Tensor, padded: PaddedRows) -> Tensor:
        ctx.slots = padded.slots
        return x.index_select(0, padded.rows)

    @staticmethod
    def backward(ctx: _Saved, upstream: Tensor) -> tuple[Tensor, None]:
        assert ctx.slots is not None
        return upstream.index_select(0, ctx.slots), None


class _Unpad(torch.autograd.Function):
    """Maps padded rows to packed rows. Backward: padding gets 0. The gradient is contiguous, because torch's cache of
    graphs does not compare its strides."""

    @staticmethod
    def forward(ctx: _Saved, x: Tensor, slots: Tensor | None) -> Tensor:
        ctx.slots, ctx.total = slots, len(x)
        return x.view_as(x) if slots is None else x.index_select(0, slots)

    @staticmethod
    def backward(ctx: _Saved, upstream: Tensor) -> tuple[Tensor, None]:
        if ctx.slots is None:
            return upstream.contiguous(), None
        padded = upstream.new_zeros(ctx.total, *upstream.shape[1:])
        return padded.index_copy_(0, ctx.slots, upstream), None


def dense_cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Computes causal attention q [S, A, L, D], k and v [S, G, L, D] -> [S, A, L, D] by cuDNN. The first call with a
    shape builds a graph. The gradients are not deterministic."""
    out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False, scale=scale
    )[0]
    return out


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batches: FusedBatches,
    scale: float,
    kernel: Callable[[Tensor, Tensor, Tensor, float], Tensor] = dense_cudnn,
) -> Tensor:
    """Computes `padded_attention` without a window, a cap and sinks: query [n, A, D], key and value [K, G, D] of every
    run -> [n, A, D]."""
    rows = (batches.queries, batches.keys, batches.keys)
    padded = [
        x.contiguous() if which is None else _Pad.apply(x, which)
        for x, which in zip((query, key, value), rows, strict=True)
    ]
    sizes, outputs = batches.sizes, []
    lengths = [count * length for count, length in sizes]
    parts = [[x] if len(sizes) == 1 else x.split(lengths) for x in padded]
    for size, *qkv in zip(sizes, *parts, strict=True):
        q, k, v = (x.unflatten(0, size).transpose(1, 2) for x in qkv)
        outputs.append(kernel(q, k, v, scale).transpose(1, 2).flatten(0, 1))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    out: Tensor = _Unpad.apply(joined, None if batches.queries is None else batches.queries.slots)
    return out


def find_obstacle(query: Tensor, window: int | None, cap: float | None, sinks: Tensor | None) -> str | None:
    """Returns why cuDNN's kernels do not compute this attention, or None."""
    if not query.is_cuda or query.dtype == torch.float32:
        return f"the layer runs on {query.device.type} in {str(query.dtype).removeprefix('torch.')}"
    if torch.cuda.get_device_capability(query.device) != (9, 0):
        return "the GPU is not of the Hopper generation"
    return find_model_obstacle(query.shape[-1], window, cap, sinks=sinks is not None)
