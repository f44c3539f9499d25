"""Exchange of heads between context-parallel ranks (DeepSpeed Ulysses, 2309.14509).

    some tokens, all heads -> all tokens, some heads -> ... -> some tokens, all heads

A layer that needs whole sequences gets them, and no rank holds more than its share. Each function is one collective.

Shapes: C ranks, P rows of a rank, T tokens of the packed row, A heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.tensor_parallel import all_to_all
from torch import Tensor, cat
from torch.distributed import ProcessGroup


def whole_sequences(parts: Sequence[Tensor], group: ProcessGroup, gathered: Tensor) -> list[Tensor]:
    """Maps each [P, A, D] of this rank's tokens to [T, A / C, D] of the row's tokens: this rank's part of the heads.

    A part with fewer heads than ranks has each head on C / A neighbouring ranks, and its gradient is their sum.
    `gathered` [T] are the rows of the tokens in all ranks' concatenated rows.
    """
    size = group.size()
    repeated = [x.repeat_interleave(size // x.shape[1], dim=1) if x.shape[1] < size else x for x in parts]
    split = [x.unflatten(1, (size, -1)) for x in repeated]
    sent = cat(split, dim=2).transpose(0, 1)  # [C, P, heads per rank, D]
    received: Tensor = all_to_all(group, sent.contiguous())
    tokens = received.flatten(0, 1).index_select(0, gathered)
    # copies, because the backward of a view would keep all parts
    return [x.contiguous() for x in tokens.split([x.shape[2] for x in split], dim=1)]


def own_rows(x: Tensor, group: ProcessGroup, gathered: Tensor, rows: int) -> Tensor:
    """Reverses `whole_sequences`: maps [T, A / C, D] to [P, A, D] with P = `rows`, and zeros in padding rows."""
    size = group.size()
    padded = x.new_zeros(size * rows, *x.shape[1:]).index_copy(0, gathered, x)
    received: Tensor = all_to_all(group, padded)
    parts: Tensor = received.unflatten(0, (size, rows))
    return parts.transpose(0, 1).flatten(1, 2)


def own_heads(parameter: Tensor, group: ProcessGroup) -> Tensor:
    """Returns the rows of a parameter for the heads that this context-parallel rank computes."""
    return parameter.chunk(group.size())[group.rank()]
