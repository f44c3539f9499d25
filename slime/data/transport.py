"""The form of train data between processes: one array per column of tensors.

Pickling a tensor takes as long as copying 100 kB, and a rollout has thousands of small tensors, three per sample. The
content of a column decides if it is packed, so this file names no column.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from slime.data.rank_data import RankData
from slime.types import TrainData


@dataclass(frozen=True)
class PackedColumn:
    """Tensors with the same dtype and the same shape after the first dimension."""

    values: np.ndarray
    """The concatenated tensors."""
    lengths: list[int]
    """First size per tensor."""


def pack_columns(data: RankData) -> TrainData:
    """Makes a PackedColumn from each list of host tensors that have one dtype and differ in their first size only.
    Other columns stay as they are."""
    return {name: _packed(column) for name, column in data.items()}


def count_bytes(data: RankData) -> int:
    """Returns the bytes of the tensors in a rank's data."""
    lists = (column for column in data.values() if isinstance(column, list))
    return sum(item.nbytes for column in lists for item in column if isinstance(item, torch.Tensor))


def _packed(column: object) -> object:
    if not isinstance(column, list) or not column:
        return column
    if not all(isinstance(x, torch.Tensor) and x.dim() >= 1 and x.device.type == "cpu" for x in column):
        return column
    if column[0].dtype == torch.bfloat16:  # numpy has no bfloat16
        return column
    if len({(x.dtype, x.shape[1:]) for x in column}) > 1:
        return column
    return PackedColumn(torch.cat(column).numpy(), [len(x) for x in column])


def unpack_columns(data: TrainData) -> RankData:
    """Returns the columns from before `pack_columns`. The tensors of a column share one new array, and callers may
    write to them."""
    return RankData(
        {
            name: list(torch.split(torch.from_numpy(column.values.copy()), column.lengths))
            if isinstance(column, PackedColumn)
            else column
            for name, column in data.items()
        }
    )
