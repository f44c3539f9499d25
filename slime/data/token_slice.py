"""Context parallelism as arithmetic: which tokens of a packed row each rank computes.

Each sequence is cut into 2 C nearly equal runs for C ranks, and rank c computes runs c and 2 C - 1 - c. An early run
needs little causal attention and a late run much, so that all ranks have the same work ("zigzag", as in Megatron-LM).
Sequences are not padded. A rank may have no token of a short sequence.

Where one rank computes the row, sequences with the same prompt share its tokens: the first one computes them, and the
others begin after them. Every token keeps a place in the packed row, as if nothing were shared.
Shapes: T packed tokens, n tokens of this rank, P rows that every rank computes (its tokens, then padding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Run:
    """Tokens [start, stop) of one sequence. Their attention reads its tokens [0, stop)."""

    sequence: int
    start: int
    stop: int


@dataclass(frozen=True)
class TokenSlice:
    """The part of one packed row that rank `rank` of `size` computes. Tensors are int64 on the host."""

    lengths: tuple[int, ...]
    """Tokens of each sequence of the row."""
    rank: int
    size: int
    runs: list[Run]
    """This rank's runs, in its order."""
    tokens: Tensor
    """[n]: the place of each of its tokens in the packed row."""
    rows: int
    """P, equal on all ranks."""
    gathered: Tensor
    """[T]: the place of each packed token when the P rows of all ranks are concatenated."""
    shares: bool = False
    """Some tokens are computed once for several sequences."""

    def row_of(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the packed places `tokens` this rank computes (indices into `tokens`), and in which of its rows."""
        row = self.gathered[tokens] - self.rank * self.rows
        (mine,) = torch.nonzero((row >= 0) & (row < self.rows), as_tuple=True)
        return mine, row[mine]


def ranges(starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """`cat([arange(s, s + n) for s, n in zip(starts, lengths)])`, int64. Fast for a thousand short ranges."""
    sizes = torch.tensor(lengths, dtype=torch.int64)
    shift = torch.tensor(starts, dtype=torch.int64) - (sizes.cumsum(0) - sizes)
    return shift.repeat_interleave(sizes) + torch.arange(int(sizes.sum()))


def token_slice(
    lengths: Sequence[int],
    *,
    rank: int = 0,
    size: int = 1,
    multiple: int = 1,
    prompts: Sequence[tuple[int, int]] = (),
) -> TokenSlice:
    """The part of rank `rank` of `size` in a row of sequences of `lengths` tokens; P is a multiple of `multiple`.

    `prompts`: for each sequence an earlier one, or itself, and how many first tokens it takes from there (0 from
    itself); for one rank only. ValueError for an empty list or a length below 1.
    """
    assert size == 1 or not prompts
    if not lengths or min(lengths) < 1:
        raise ValueError(
            f"lengths must be positive and at least one, got {list(lengths)[:8]}; drop empty sequences"
        )
    first = torch.tensor([0, *lengths]).cumsum(0).tolist()
    if prompts:
        starts = [taken for _, taken in prompts]
        runs = [[Run(s, a, b) for s, (a, b) in enumerate(zip(starts, lengths, strict=True)) if a < b]]
    else:
        runs = [_runs(lengths, r, size) for r in range(size)]
    tokens = [
        ranges([first[x.sequence] + x.start for x in of_rank], [x.stop - x.start for x in of_rank])
        for of_rank in runs
    ]
    rows = -(-max(len(x) for x in tokens) // multiple) * multiple
    gathered = torch.empty(first[-1], dtype=torch.int64)
    for r, places in enumerate(tokens):
        gathered[places] = r * rows + torch.arange(len(places))
    for s, (of, taken) in enumerate(prompts):
        gathered[first[s] : first[s] + taken] = gathered[first[of] : first[of] + taken]
    shares = any(taken for _, taken in prompts)
    return TokenSlice(tuple(lengths), rank, size, runs[rank], tokens[rank], rows, gathered, shares)


def run_bounds(length: int, rank: int, size: int) -> list[tuple[int, int]]:
    """(start, stop) of the two runs of one rank in a sequence of `length` tokens; a run may be empty. With one rank,
    the sequence is one run."""
    if size == 1:
        return [(0, length)]
    return [(length * k // (2 * size), length * (k + 1) // (2 * size)) for k in (rank, 2 * size - 1 - rank)]


def _runs(lengths: Sequence[int], rank: int, size: int) -> list[Run]:
    """The non-empty runs of one rank."""
    return [
        Run(s, start, stop)
        for s, length in enumerate(lengths)
        for start, stop in run_bounds(length, rank, size)
        if stop > start
    ]
