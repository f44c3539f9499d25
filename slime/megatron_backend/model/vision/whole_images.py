"""Attention of image tokens to all tokens of their image, also to later ones (`Vision.sees_whole_image`).

All other tokens see only earlier tokens. So the causal attention runs for all tokens, and the rows of image tokens are
replaced: the last key of an image's queries is the last token of the image. A sliding window bounds the earlier keys
only, as in transformers.

Shapes: k image tokens of this rank, n tokens of this rank, K keys of all runs (`PackedLayout`), A query heads, G
key/value heads, D head size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slime.data.token_slice import TokenRun, ranges
from slime.megatron_backend.model.attention_scores import plain_attention, varlen_attention
from slime.system.uploads import upload


@dataclass(frozen=True)
class WholeImages:
    """The image tokens of this rank. The keys of an image are the tokens of its sequence up to the image's last one."""

    rows: Tensor
    """[k] int64: the rows of the queries."""
    keys: Tensor
    """Rows of the images' keys among the K keys, image by image."""
    first_query: Tensor
    """int32, bounds of the images in `rows`."""
    first_key: Tensor
    """int32, bounds of the images in `keys`."""
    lengths: tuple[tuple[int, int], ...]
    """Number of queries and of keys per image."""


def find_whole_images(
    runs: Sequence[TokenRun], spans: Sequence[tuple[int, int]], device: torch.device | str
) -> WholeImages | None:
    """Returns the image tokens of a rank that computes `runs`. `spans` has the rows [start, stop) of each image; a run
    has all tokens of its images. Returns None without images."""
    if not spans:
        return None
    first_rows = list(accumulate((run.stop - run.start for run in runs), initial=0))
    first_keys = list(accumulate((run.stop for run in runs), initial=0))
    lengths, starts = [], []
    for start, stop in spans:
        number = bisect_right(first_rows, start) - 1
        run = runs[number]
        assert stop <= first_rows[number + 1], "an image lies in one run"
        lengths.append((stop - start, run.start + stop - first_rows[number]))
        starts.append(first_keys[number])
    queries, keys = zip(*lengths, strict=True)
    return WholeImages(
        upload(ranges([start for start, _ in spans], queries), device),
        upload(ranges(starts, keys), device),
        upload(torch.tensor([0, *accumulate(queries)], dtype=torch.int32), device),
        upload(torch.tensor([0, *accumulate(keys)], dtype=torch.int32), device),
        tuple(lengths),
    )


def attend_to_whole_images(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    images: WholeImages,
    scale: float,
    window: int | None,
    cap: float | None,
    *,
    flash: bool,
) -> Tensor:
    """Returns the output `out` [n, A, D] of causal attention with other rows for image tokens. query [n, A, D], key and
    value [K, G, D]. With `flash`, torch's variable-length kernel computes them."""
    q, k, v = query[images.rows], key[images.keys], value[images.keys]
    if flash:
        queries, keys = zip(*images.lengths, strict=True)
        found = varlen_attention()(
            *(q, k, v, images.first_query, images.first_key, max(queries), max(keys)),
            scale=scale,
            window_size=(-1 if window is None else window - 1, -1),
        )
    else:
        sizes = [list(of_image) for of_image in zip(*images.lengths, strict=True)]
        parts = zip(q.split(sizes[0]), k.split(sizes[1]), v.split(sizes[1]), strict=True)
        found = torch.cat([_attend(*part, scale, window, cap) for part in parts])
    return out.index_copy(0, images.rows, found.to(out.dtype))


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
) -> Tensor:
    """Maps an image's queries and keys to the output. The last query has the last key."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    queries, keys = q.shape[2], k.shape[2]
    index = torch.arange(keys - queries, keys, device=q.device)[:, None]
    seen = torch.arange(keys, device=q.device) > index - (window or keys)
    if cap is None:
        out = scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=q.shape[1] > k.shape[1])
    else:
        out = plain_attention(q, k, v, seen, scale, cap, None)
    return out[0].transpose(0, 1)
