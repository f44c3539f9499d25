"""The lightning indexer of sparse latent attention, and attention to the tokens that it selects (DeepSeek-V3.2,
2512.02556, part 2.1), in plain PyTorch on every device.

    score of a key = sum over heads of w * relu(q @ k) * (heads * size) ** -0.5
    a query sees the `topk` keys with the highest scores, or all keys if it has no more

The scores are computed for a part of the queries at a time. The attention computes all scores of such a part, masks
those that were not selected, and is computed again in the backward. It is correct and slow: its time grows with the
square of the length, as that of dense attention.

Shapes: n tokens of this rank, K keys of every run, S sequences of a bucket, A heads, I heads of the indexer, D head
size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from slime.megatron_backend.model.attention import (
    PackedAttention,
    PackedLayout,
    gather_keys,
    rotated,
)
from slime.megatron_backend.model.attention_scores import Bucket, bucket_attention
from slime.megatron_backend.model.latent.whole_linear import WholeLinear
from slime.models.latent import MOST_SCORES, Indexer

Selection = list[Tensor | None]
"""Per bucket, the keys that each query sees: int32 [S, queries, topk]. None for a bucket whose queries see all
previous keys."""

_NORM_EPS = 1e-6
"""config.json has no value for the norm of the indexer's keys."""


class LightningIndexer(nn.Module):
    """Selects the keys that a query sees. The selection has no gradient, so the parameters are frozen. Their names are
    those of the files."""

    def __init__(self, config: TransformerConfig, q_rank: int, sizes: Indexer) -> None:
        super().__init__()
        self.sizes, self.sequence_parallel = sizes, config.sequence_parallel
        self.wq_b = WholeLinear(config, q_rank, sizes.heads * sizes.size, bias=False)
        self.wk = WholeLinear(config, config.hidden_size, sizes.size, bias=False)
        self.k_norm = nn.LayerNorm(sizes.size, eps=_NORM_EPS)
        self.weights_proj = nn.Linear(config.hidden_size, sizes.heads, bias=False)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, hidden: Tensor, latent: Tensor, layout: PackedLayout) -> Selection:
        """Maps hidden states [T, 1, H] and the normed latent vectors of the queries [T, 1, q_rank] to the selection.
        Tensor-parallel ranks select the same keys."""
        heads, size = self.sizes.heads, self.sizes.size
        weights = linear(hidden.float(), self.weights_proj.weight.float()) * (heads * size) ** -0.5
        parts = torch.cat((self.wq_b(latent), self.k_norm(self.wk(hidden))), dim=-1).squeeze(1)
        weights = weights.squeeze(1)
        if self.sequence_parallel:
            parts, weights = (gather_from_sequence_parallel_region(x) for x in (parts, weights))
        turned = rotated(parts.unflatten(-1, (heads + 1, size)), layout, self.sizes.rope)[: layout.own]
        query, (first, second) = turned[:, :heads], turned[:, heads:].chunk(2, dim=-1)
        key = torch.cat(gather_keys(first, second, layout), dim=-1)
        of_queries = (layout.split(x) for x in (query, weights[: layout.own, :, None]))
        buffers = (*of_queries, layout.split(key, keys=True))
        return [
            _select(bucket, q, k, w, self.sizes.topk)
            for bucket, q, w, k in zip(layout.buckets, *buffers, strict=True)
        ]


def _select(bucket: Bucket, q: Tensor, k: Tensor, w: Tensor, topk: int) -> Tensor | None:
    """Maps q [S, I, queries, D], k [S, 1, keys, D] and w [S, I, queries, 1] to keys, int32 [S, queries, topk]."""
    if bucket.keys <= topk:
        return None
    found, keys = [], k.squeeze(1).float().transpose(-1, -2)
    for part, seen in _parts(bucket, q.shape[1], q.device):
        scores = _score(q[:, :, part].float(), keys, w[:, :, part]).masked_fill_(~seen, -torch.inf)
        found.append(scores.topk(topk, dim=-1).indices.to(torch.int32))
    return torch.cat(found, dim=1)


def _score(q: Tensor, keys: Tensor, w: Tensor) -> Tensor:
    """Maps q [S, I, queries, D], keys [S, D, keys] and w [S, I, queries, 1] to scores [S, queries, keys], with one copy
    of all heads' scores. One product per sequence has all heads: torch copies the keys for each head otherwise."""
    of_heads = (q.flatten(1, 2) @ keys).unflatten(1, q.shape[1:3])
    total: Tensor = of_heads.relu_().mul_(w).sum(1)
    return total


def _parts(bucket: Bucket, heads: int, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    """Yields parts of a bucket's queries, each with the keys that come no later: bool [S or 1, queries of the part,
    keys]."""
    size = max(1, MOST_SCORES // (bucket.runs * bucket.keys * heads))
    keys = torch.arange(bucket.keys, device=device)
    for first in range(0, bucket.queries, size):
        part = slice(first, min(first + size, bucket.queries))
        if bucket.mask is None:  # a query has the same index as its key
            yield part, (keys <= keys[part, None])[None]
        else:
            yield part, bucket.mask[:, 0, part]


def selected_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float, selection: Selection
) -> Tensor:
    """Computes attention of each query to its selected keys: query [n, A, D], key and value [K, A, D] -> [n, A, D]."""
    if not layout.own:  # keep the dependency on keys and values, because their backward is a collective
        return query + (key.sum() + value.sum())
    outputs = []
    buffers = (layout.split(query), layout.split(key, keys=True), layout.split(value, keys=True))
    for bucket, q, k, v, chosen in zip(layout.buckets, *buffers, selection, strict=True):
        if chosen is None:
            out = bucket_attention(q, k, v, bucket.mask, scale)
        else:
            parts = [
                checkpoint(
                    _attend,
                    *(q[:, :, part], k, v, chosen[:, part], seen, scale),
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
                for part, seen in _parts(bucket, q.shape[1], q.device)
            ]
            out = torch.cat(parts, dim=2)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, layout.query_slots)


def _attend(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Maps q [S, A, queries, D], k and v [S, A, keys, D] to [S, A, queries, D]. `chosen` may have later keys for a
    query with fewer than `topk` previous keys."""
    mask = torch.zeros(*chosen.shape[:2], k.shape[2], dtype=torch.bool, device=q.device)
    mask = mask.scatter_(-1, chosen.long(), True) & seen
    return scaled_dot_product_attention(q, k, v, mask[:, None], scale=scale)


class SelectedAttention(PackedAttention):
    """`PackedAttention` of each query to its selected keys. `selection` is that of the current micro-batch, or None if
    its queries see all previous keys."""

    selection: Selection | None = None

    def _compute(
        self, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, sinks: Tensor | None
    ) -> Tensor:
        if self.selection is None:
            return super()._compute(query, key, value, layout, sinks)
        return selected_attention(query, key, value, layout, self.scale, self.selection)
