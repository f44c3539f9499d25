"""Divides a workspace: it chooses the columns of the logits that are kept for the backward, and the sizes of tiles and
blocks.

The module is plain arithmetic over bytes. Legend: N tokens, V columns of this process.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl_kernel.checks import invalid

WORKSPACE_BYTES = 1536 * 2**20
"""Default limit in bytes: 1.5 GiB. With this limit, the operators with three products reach their speed for
vocabularies of 150k tokens."""
COLUMN_BLOCK = 256
SMALL_BLOCK, LARGE_BLOCK = 128, 512
"""The rows of a block are a multiple of SMALL_BLOCK or LARGE_BLOCK. At many other sizes, the product for the gradient
of `hidden` loses up to a fifth of its speed (H 2048, 2560 and 4096 on an H200)."""
MIN_COLUMNS = 1024
"""Least number of columns of a tile. For a narrower tile, adding up the gradient of `hidden` takes longer than the
products."""

ADVICE = "; with weight_grad, a buffer to add to, the workspace holds no sum of its own"

RECOMPUTED = 1.05
"""Time to compute all logits a second time, in units of one product over all tokens."""
BLOCK_OVERHEAD = 600.0
"""Time of a further block, in units of the product of one token: the read and write of a float32 weight gradient (about
400 on an H200, for every shape) and the start and end of the products."""


@dataclass(frozen=True)
class Costs:
    """Bytes of workspace: `row` per token, `element` per logit in memory. `scratch`: in the forward, columns that are
    not kept need separate memory."""

    row: int
    element: int
    scratch: bool


@dataclass(frozen=True)
class Budget:
    """The columns [0, kept) keep their tile until the backward. The backward computes the other columns again, `tile`
    columns at a time."""

    kept: int
    tile: int


def plan(tokens: int, columns: int, costs: Costs, workspace_bytes: int, advice: str = "") -> Budget:
    """Returns the columns to keep if all tokens are computed at once.

    Raises ValueError, which names the least workspace, if even a narrow tile with all tokens does not fit. `advice` is
    appended to the error's text.
    """
    if tokens == 0:
        return Budget(columns, columns)
    fits = (workspace_bytes - tokens * costs.row) // (tokens * costs.element)
    if fits >= columns:
        return Budget(columns, columns)
    least = _least(columns, costs)
    if fits < least:
        need = tokens * (costs.row + least * costs.element)
        todo = f"give {tokens} tokens at least {_mib(need)} MiB, or pass fewer tokens at a time{advice}"
        raise invalid("workspace_bytes", f"be >= {need}", workspace_bytes, todo)
    if not costs.scratch:
        return Budget(_whole_blocks(fits), _whole_blocks(fits))
    tile = max(MIN_COLUMNS, fits // 4)
    return Budget(_whole_blocks(fits - tile), _whole_blocks(tile))


def forward_rows(tokens: int, columns: int, costs: Costs, workspace_bytes: int) -> int:
    """Returns the rows of a block of a forward without gradients. Such a forward keeps no columns, so that a block has
    the largest number of rows that fits together with a tile.

    Raises ValueError, which names the least workspace, if even a small block does not fit.
    """
    fits = workspace_bytes // (costs.row + _least(columns, costs) * costs.element)
    if fits >= tokens:
        return max(tokens, 1)
    if fits < SMALL_BLOCK:
        plan(min(tokens, SMALL_BLOCK), columns, costs, workspace_bytes)
    return fits // SMALL_BLOCK * SMALL_BLOCK


def block_rows(tokens: int, columns: int, costs: Costs, workspace_bytes: int, sum_bytes: int = 0) -> int:
    """Returns the rows of a block with the least estimated time; the last block may have fewer rows.

    The choice is between all tokens at once, where tiles that do not fit are computed twice, and several blocks, where
    each block adds to the whole weight gradient. `sum_bytes`: memory for the sum, which several blocks take from the
    workspace.

    Raises ValueError, which names the least workspace, if no choice fits.
    """
    best, best_rows = float("inf"), tokens
    for parts in range(1, -(-tokens // SMALL_BLOCK) + 1):
        rows = tokens if parts == 1 else _rounded_rows(-(-tokens // parts))
        blocks = -(-tokens // rows)
        rest = workspace_bytes - (sum_bytes if blocks > 1 else 0)
        fits = (rest - rows * costs.row) // (rows * costs.element)
        if fits < _least(columns, costs):
            continue
        cost = RECOMPUTED * max(0.0, 1 - fits / columns) + (blocks - 1) * BLOCK_OVERHEAD / tokens
        if cost < best:
            best, best_rows = cost, rows
    if tokens and best == float("inf"):
        # Without a sum, the error names the workspace of the smallest block. With a sum, which alone is too large, the
        # error names the workspace for all tokens at once.
        least = tokens if sum_bytes else min(tokens, SMALL_BLOCK)
        plan(least, columns, costs, workspace_bytes, ADVICE if sum_bytes else "")
    return max(best_rows, 1)


def _rounded_rows(rows: int) -> int:
    unit = LARGE_BLOCK if rows > LARGE_BLOCK else SMALL_BLOCK
    return -(-rows // unit) * unit


def _least(columns: int, costs: Costs) -> int:
    """Returns the least number of columns for which every token of a call needs memory. If all columns are kept, no
    scratch memory is needed."""
    return min(MIN_COLUMNS * (2 if costs.scratch else 1), columns)


def _whole_blocks(columns: int) -> int:
    return columns // COLUMN_BLOCK * COLUMN_BLOCK or columns


def _mib(size: int) -> int:
    return -(-size // 2**20)
