"""The arithmetic of context parallelism: the tokens of a packed row that each rank computes.

Each sequence is cut into 2 C nearly equal runs for C ranks, and rank c computes runs c and 2 C - 1 - c. An early run
needs little causal attention and a late run needs much, so all ranks have the same work ("zigzag", as in Megatron-LM).
Sequences are not padded. A rank may have no token of a short sequence.

If one rank computes the row, sequences with the same prompt share the prompt's tokens: the first sequence computes
them, and the other sequences begin after them. Every token has an index in the packed row, also a shared token. Shapes:
the row has T packed tokens, this rank has n tokens, and every rank computes P rows (its tokens, then padding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenRun:
    """Tokens [start, stop) of a sequence. Their attention reads the sequence's tokens [0, stop)."""

    sequence: int
    start: int
    stop: int


@dataclass(frozen=True)
class TokenSlice:
    """The part of a packed row that rank `rank` of `size` computes. Tensors are int64 on the host."""

    lengths: tuple[int, ...]
    """Number of tokens per sequence in the row."""
    rank: int
    size: int
    runs: list[TokenRun]
    """This rank's runs, in the order of computation."""
    tokens: Tensor
    """[n]: the indices of this rank's tokens in the packed row."""
    rows: int
    """P, which is equal on all ranks."""
    gathered: Tensor
    """[T]: the index of each packed token in the concatenation of every rank's P rows."""
    shares: bool = False
    """True if the rank computes some tokens once for several sequences."""

    def find_rows(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns which of the packed indices `tokens` this rank computes (as indices into `tokens`), and the rank's
        rows for them."""
        row = self.gathered[tokens] - self.rank * self.rows
        (mine,) = torch.nonzero((row >= 0) & (row < self.rows), as_tuple=True)
        return mine, row[mine]


def ranges(starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Returns `cat([arange(s, s + n) for s, n in zip(starts, lengths)])`, int64. Fast for a thousand short ranges."""
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
    """Returns the part of rank `rank` of `size` in a row of sequences with `lengths` tokens. P is a multiple of
    `multiple`.

    `prompts` has a pair for each sequence: an earlier sequence, or the sequence itself, and the number of first tokens
    that it takes from there (0 from itself). `prompts` needs `size` 1. Raises ValueError for an empty list or a length
    below 1.
    """
    assert size == 1 or not prompts
    if not lengths or min(lengths) < 1:
        raise ValueError(
            f"lengths must be positive and at least one, got {list(lengths)[:8]}; drop empty sequences"
        )
    first = torch.tensor([0, *lengths]).cumsum(0).tolist()
    if prompts:
        starts = [taken for _, taken in prompts]
        runs = [[TokenRun(s, a, b) for s, (a, b) in enumerate(zip(starts, lengths, strict=True)) if a < b]]
    else:
        runs = [_runs(lengths, r, size) for r in range(size)]
    tokens = [
        ranges([first[x.sequence] + x.start for x in of_rank], [x.stop - x.start for x in of_rank])
        for of_rank in runs
    ]
    rows = -(-max(len(x) for x in tokens) // multiple) * multiple
    gathered = torch.empty(first[-1], dtype=torch.int64)
    for r, indices in enumerate(tokens):
        gathered[indices] = r * rows + torch.arange(len(indices))
    for s, (of, taken) in enumerate(prompts):
        gathered[first[s] : first[s] + taken] = gathered[first[of] : first[of] + taken]
    shares = any(taken for _, taken in prompts)
    return TokenSlice(tuple(lengths), rank, size, runs[rank], tokens[rank], rows, gathered, shares)


def run_bounds(length: int, rank: int, size: int) -> list[tuple[int, int]]:
    """Returns (start, stop) of a rank's two runs in a sequence of `length` tokens. A run may be empty. With one rank,
    the sequence is one run."""
    if size == 1:
        return [(0, length)]
    return [(length * k // (2 * size), length * (k + 1) // (2 * size)) for k in (rank, 2 * size - 1 - rank)]


def _runs(lengths: Sequence[int], rank: int, size: int) -> list[TokenRun]:
    """Returns the non-empty runs of a rank."""
    return [
        TokenRun(s, start, stop)
        for s, length in enumerate(lengths)
        for start, stop in run_bounds(length, rank, size)
        if stop > start
    ]
