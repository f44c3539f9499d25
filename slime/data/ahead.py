"""Multi-token prediction over a packed row: which token each place reads ahead, and which token it predicts.

Depth k of multi-token prediction gets the state of place t and the token of place t + k. It predicts the token of place
t + k + 1. All of them are of one sequence. Shapes: T packed tokens, P rows of this rank, R response tokens of the
micro-batch, r of them this rank's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slime.data.packing import MicroBatch
from slime.data.token_slice import TokenSlice, token_slice


@dataclass(frozen=True)
class Ahead:
    """What depth k reads and predicts, int64 on the host.

    The first k tokens of a sequence are not predicted by its own places, so that a response may lack up to k
    tokens.
    """

    tokens: Tensor
    """[P]: the token k places after that of each row, 0 where the sequence has ended, and in padding."""
    rows: Tensor
    """[r]: the rows that predict a response token."""
    targets: Tensor
    """[r]: these tokens."""
    of_response: Tensor
    """[r]: their places among all R response tokens."""


def unshared(part: TokenSlice, multiple: int) -> TokenSlice:
    """The rank's part of the row in which no sequence takes its prompt from another one. The last token of a shared
    prompt has a next token in each sequence."""
    return token_slice(part.lengths, multiple=multiple) if part.shares else part


def look_ahead(batch: MicroBatch, part: TokenSlice, depth: int) -> Ahead:
    """`part`: that of `batch`, or `unshared` of it."""
    lengths = torch.tensor(part.lengths, dtype=torch.int64)
    ends = lengths.cumsum(0)
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
    further = torch.arange(len(batch.packed)) + depth
    inside = further < ends[sequence]
    after = torch.where(inside, batch.packed[further.clamp_max(len(batch.packed) - 1)], 0)
    tokens = torch.zeros(part.rows, dtype=torch.int64)
    tokens[: len(part.tokens)] = after[part.tokens]
    place = batch.predicting - depth
    first = (ends - lengths)[sequence[batch.predicting]]
    (predicted,) = torch.nonzero(place >= first, as_tuple=True)
    mine, rows = part.row_of(place[predicted])
    of_response = predicted[mine]
    return Ahead(tokens, rows, batch.packed[batch.predicting[of_response] + 1], of_response)
