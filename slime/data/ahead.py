"""Multi-token prediction over a packed row: the token that each index reads ahead, and the token that it predicts.

Depth k of multi-token prediction reads the state at index t and the token at index t + k, and predicts the token at
index t + k + 1. All three indices are in one sequence. Shapes: the row has T packed tokens, this rank has P rows, and
the micro-batch has R response tokens. This rank predicts r of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slime.data.packing import MicroBatch
from slime.data.token_slice import TokenSlice, token_slice


@dataclass(frozen=True)
class Ahead:
    """The inputs and targets of depth k, int64 on the host.

    No index of a sequence predicts the sequence's first k tokens, so a response may lack up to k targets.
    """

    tokens: Tensor
    """[P]: for each row, the token k indices later, and 0 after the end of the sequence and in padding."""
    rows: Tensor
    """[r]: the rows that predict a response token."""
    targets: Tensor
    """[r]: the predicted response tokens."""
    of_response: Tensor
    """[r]: indices of the predicted tokens among all R response tokens."""


def unshared(part: TokenSlice, multiple: int) -> TokenSlice:
    """Returns the rank's part of the row without shared prompts. The last token of a shared prompt has a different next
    token in each sequence."""
    return token_slice(part.lengths, multiple=multiple) if part.shares else part


def look_ahead(batch: MicroBatch, part: TokenSlice, depth: int) -> Ahead:
    """Returns the inputs and targets of depth `depth`. `part` is the part of `batch`, or the result of `unshared` for
    it."""
    lengths = torch.tensor(part.lengths, dtype=torch.int64)
    ends = lengths.cumsum(0)
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
    further = torch.arange(len(batch.packed)) + depth
    inside = further < ends[sequence]
    after = torch.where(inside, batch.packed[further.clamp_max(len(batch.packed) - 1)], 0)
    tokens = torch.zeros(part.rows, dtype=torch.int64)
    tokens[: len(part.tokens)] = after[part.tokens]
    index = batch.predicting - depth
    first = (ends - lengths)[sequence[batch.predicting]]
    (predicted,) = torch.nonzero(index >= first, as_tuple=True)
    mine, rows = part.find_rows(index[predicted])
    of_response = predicted[mine]
    return Ahead(tokens, rows, batch.packed[batch.predicting[of_response] + 1], of_response)
