"""`expert_dispatch` and `expert_combine` in plain PyTorch: the definition of correct, with autograd's gradients."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def expert_rows(ids: Tensor, first: int, count: int, *, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Returns the row of each (token, expert) pair if the pairs of this rank's experts are sorted by expert, then by
    token.

    Args:
        ids: [T, K] integers, each token's experts. The experts of a token differ, except that ids outside of the
            range may repeat.
        first, count: this rank has the experts `first` to `first + count - 1`.
        descending: gives the first rows to the highest expert.

    Returns:
        `rows`, int32 [T, K]: each pair's row, -1 for an expert on another rank. `counts`, int32 [count]: the
        number of rows per expert, in the order of the rows.

    The host does not wait for the device. Memory: 8 bytes for each token and expert.
    """
    local = ids.long() - first
    here = (local >= 0) & (local < count)
    if descending:
        local = count - 1 - local
    slots = torch.where(here, local, count)
    hits = torch.zeros(count + 1, len(ids), dtype=torch.int32, device=ids.device)
    hits.scatter_(0, slots.T, 1)
    ranks = hits[:count].cumsum(1, dtype=torch.int32)
    counts = ranks[:, -1] if len(ids) else hits.new_zeros(count)
    starts = counts.cumsum(0, dtype=torch.int32) - counts
    # [count, T] -> the entry of each pair
    rows = (ranks + (starts - 1)[:, None]).T.gather(1, slots.clamp(max=count - 1))
    return torch.where(here, rows, -1), counts


def dispatch_reference(x: Tensor, weights: Tensor, rows: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Computes x [T, H], weights [T, K], rows [T, K] -> [total, H] and [total]. The gradient of x is summed in
    float32."""
    token, k = (rows >= 0).nonzero(as_tuple=True)
    target = rows[token, k].long()
    out = _wide(x).new_zeros(total, x.shape[1]).index_put((target,), _wide(x)[token])
    return out.to(x.dtype), weights.new_zeros(total).index_put((target,), weights[token, k])


def combine_reference(y: Tensor, rows: Tensor) -> Tensor:
    """Computes the sums y [C, H], rows [T, K] -> [T, H]."""
    padded = torch.cat((_wide(y), _wide(y).new_zeros(1, y.shape[1])))  # row -1 is zero
    out = padded.new_zeros(len(rows), y.shape[1])
    for chosen_rows in rows.long().unbind(1):
        out = out + padded[chosen_rows]
    return out.to(y.dtype)


def _wide(x: Tensor) -> Tensor:
    """Converts x to float32; float64 stays as it is."""
    return x if x.dtype == torch.float64 else x.float()
