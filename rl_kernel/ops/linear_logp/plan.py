"""How a workspace is divided: the columns of the logits that are kept for the backward, and the size of tiles and
blocks.

Plain arithmetic over bytes. Legend: N tokens, V columns of this process.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl_kernel.checks import invalid

WORKSPACE_BYTES = 1536 * 2**20
"""Default limit: 1.5 GiB. With it, the forms of three products reach their speed for vocabularies of 150k tokens."""
COLUMN_BLOCK = 256
SMALL_BLOCK, LARGE_BLOCK = 128, 512
"""Rows of a block are a multiple of one of these. At many other sizes, the product for the gradient of `hidden` loses
up to a fifth of its speed (H 2048, 2560 and 4096 on an H200)."""
MIN_COLUMNS = 1024
"""Least columns of a tile. A narrower tile takes longer to add up the gradient of `hidden` than to compute products."""

ADVICE = "; with weight_grad, a buffer to add to, the workspace holds no sum of its own"

RECOMPUTED = 1.05
"""Time to compute all logits a second time, in units of one product over all tokens."""
BLOCK_OVERHEAD = 600.0
"""Time of one more block, in units of the product of one token: the read and write of a float32 weight gradient (about
400 on an H200, whatever the shape) and the ends of the products."""


@dataclass(frozen=True)
class Costs:
    """Bytes of workspace: `row` per token, `element` per logit in memory. `scratch`: in the forward, columns that are
    not kept need memory of their own."""

    row: int
    element: int
    scratch: bool


@dataclass(frozen=True)
class Budget:
    """Columns [0, kept) keep their tile until the backward. The backward computes the others again, `tile` at a
    time."""

    kept: int
    tile: int


def plan(tokens: int, columns: int, costs: Costs, workspace_bytes: int, advice: str = "") -> Budget:
    """The columns to keep if all tokens are computed at once.

    ValueError names the least workspace if even a narrow tile of all tokens does not fit. `advice` is added to its
    text.
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
    """Rows of a block of a forward without gradients. It keeps nothing, so that a block may have as many rows as fit
    with a tile.

    ValueError names the least workspace if even a small block does not fit.
    """
    fits = workspace_bytes // (costs.row + _least(columns, costs) * costs.element)
    if fits >= tokens:
        return max(tokens, 1)
    if fits < SMALL_BLOCK:
        plan(min(tokens, SMALL_BLOCK), columns, costs, workspace_bytes)
    return fits // SMALL_BLOCK * SMALL_BLOCK


def block_rows(tokens: int, columns: int, costs: Costs, workspace_bytes: int, sum_bytes: int = 0) -> int:
    """Rows of a block with the least estimated time; the last block may have fewer.

    The choice is between all tokens at once, where tiles that do not fit are computed twice, and several blocks, where
    each block adds to the whole weight gradient. `sum_bytes`: memory of that sum, which several blocks take from the
    workspace.

    ValueError names the least workspace if no choice fits.
    """
    best, rows_of_best = float("inf"), tokens
    for parts in range(1, -(-tokens // SMALL_BLOCK) + 1):
        rows = tokens if parts == 1 else _rounded_rows(-(-tokens // parts))
        blocks = -(-tokens // rows)
        rest = workspace_bytes - (sum_bytes if blocks > 1 else 0)
        fits = (rest - rows * costs.row) // (rows * costs.element)
        if fits < _least(columns, costs):
            continue
        cost = RECOMPUTED * max(0.0, 1 - fits / columns) + (blocks - 1) * BLOCK_OVERHEAD / tokens
        if cost < best:
            best, rows_of_best = cost, rows
    if tokens and best == float("inf"):
        # Without a sum, the error names the workspace of the smallest block. With a sum, which alone is too large, it
        # names that of all tokens at once.
        least = tokens if sum_bytes else min(tokens, SMALL_BLOCK)
        plan(least, columns, costs, workspace_bytes, ADVICE if sum_bytes else "")
    return max(rows_of_best, 1)


def _rounded_rows(rows: int) -> int:
    unit = LARGE_BLOCK if rows > LARGE_BLOCK else SMALL_BLOCK
    return -(-rows // unit) * unit


def _least(columns: int, costs: Costs) -> int:
    """The columns for which every token of a call needs memory. All of them need no scratch beside them."""
    return min(MIN_COLUMNS * (2 if costs.scratch else 1), columns)


def _whole_blocks(columns: int) -> int:
    return columns // COLUMN_BLOCK * COLUMN_BLOCK or columns


def _mib(size: int) -> int:
    return -(-size // 2**20)
