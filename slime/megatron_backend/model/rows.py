"""Rows of a packed micro-batch, where one row may be read several times: by the samples that share a prompt.

The backward is deterministic on every device. The backward of torch's own indexing is not, on several CPU threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from slime.system.uploads import upload


@dataclass(frozen=True)
class GatheredRows:
    """Rows to read from `total` rows: `order` [K] int64, with repeats. `readers` [K] are the indices in `order`,
    grouped by row in ascending order, and `starts` [total] has the group start per row."""

    order: Tensor
    readers: Tensor
    starts: Tensor

    @classmethod
    def of(cls, order: Tensor, total: int) -> GatheredRows:
        in_order, readers = order.sort(stable=True)
        return cls(order, readers, torch.searchsorted(in_order, torch.arange(total, device=order.device)))

    def to(self, device: torch.device | str) -> GatheredRows:
        return GatheredRows(*(upload(x, device) for x in (self.order, self.readers, self.starts)))


def take(x: Tensor, rows: GatheredRows) -> Tensor:
    """Returns `x[rows.order]`: [total, ...] -> [K, ...]. Backward: a row gets the sum of its readers' gradients, in
    float32 and in their order, rounded once."""
    taken: Tensor = _Take.apply(x, rows)
    return taken


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: GatheredRows) -> Tensor:
        ctx.rows = rows
        return x.index_select(0, rows.order)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        rows = ctx.rows
        if not rows.order.numel():
            return upstream.new_zeros(len(rows.starts), *upstream.shape[1:]), None
        sums = embedding_bag(rows.readers, upstream.flatten(1), rows.starts, mode="sum")
        return sums.view(-1, *upstream.shape[1:]), None
