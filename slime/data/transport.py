"""Train data on its way between processes: each column of tensors as one array.

Pickling a tensor takes as long as copying 100 kB, and a rollout has thousands of small tensors: three per sample. A
column is packed because of what it holds, so that no column is named here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from slime.data.rank_data import RankData
from slime.types import TrainData


@dataclass(frozen=True)
class PackedColumn:
    """Tensors of one dtype that differ in their first size only."""

    values: np.ndarray
    """All of them, concatenated."""
    lengths: list[int]
    """The first size of each."""


def pack_columns(data: RankData) -> TrainData:
    """Make a PackedColumn of each list of host tensors that have one dtype and differ in their first size only. Other
    columns stay as they are."""
    return {name: _packed(column) for name, column in data.items()}


def _packed(column: object) -> object:
    if not isinstance(column, list) or not column:
        return column
    if not all(isinstance(x, torch.Tensor) and x.dim() >= 1 and x.device.type == "cpu" for x in column):
        return column
    if column[0].dtype == torch.bfloat16:  # which numpy does not have
        return column
    if len({(x.dtype, x.shape[1:]) for x in column}) > 1:
        return column
    return PackedColumn(torch.cat(column).numpy(), [len(x) for x in column])


def unpack_columns(data: TrainData) -> RankData:
    """Inverse of `pack_columns`. The tensors of a column share one new array, so that callers may write to them."""
    return RankData(
        {
            name: list(torch.split(torch.from_numpy(column.values.copy()), column.lengths))
            if isinstance(column, PackedColumn)
            else column
            for name, column in data.items()
        }
    )
