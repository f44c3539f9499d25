"""How a workspace is spent: which columns of the logits are kept for the backward, how many are computed at a time.

Plain arithmetic over bytes. Legend: N tokens, V local columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl_kernel.checks import invalid

WORKSPACE_BYTES = 1536 * 2**20
"""Default bound: 1.5 GiB, where the three-product forms reach their speed for vocabularies of 150k."""
COLUMN_BLOCK = 256
SMALL_BLOCK, LARGE_BLOCK = 128, 512
"""Rows of a block are multiples of these: at many sizes between multiples of 512 the product for the gradient of
`hidden` loses up to a fifth of its speed (H 2048, 2560 and 4096 on an H200)."""
MIN_COLUMNS = 1024
"""A tile narrower than this spends more on adding up the gradient of `hidden` than on products."""

ADVICE = "; with weight_grad, a buffer to add to, the workspace holds no sum of its own"

RECOMPUTED = 1.05
"""Time of computing all logits a second time, in products of all tokens."""
BLOCK_OVERHEAD = 600.0
"""Time that one more block costs, in tokens of a product: the read and write of a float32 weight gradient (about 400 on
an H200, whatever the shape) and the ends of the products."""


@dataclass(frozen=True)
class Costs:
    """Bytes of workspace: `row` for each token whatever is kept, `element` for each logit that is kept or passes
    through. `scratch`: columns that are not kept need memory of their own in the forward."""

    row: int
    element: int
    scratch: bool


@dataclass(frozen=True)
class Budget:
    """Columns [0, kept) keep their tile until the backward; the others are computed again, `tile` at a time."""

    kept: int
    tile: int


def plan(tokens: int, columns: int, costs: Costs, workspace_bytes: int, advice: str = "") -> Budget:
    """Columns to keep for all tokens at once.

    Raises ValueError, naming the least workspace, if not even a narrow tile of all tokens fits; `advice` is more to do.
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
    """Rows of a block of a forward whose gradient nobody wants: nothing is kept, so as many as have room for a tile.

    Raises ValueError, naming the least workspace, if not even a small block fits.
    """
    fits = workspace_bytes // (costs.row + _least(columns, costs) * costs.element)
    if fits >= tokens:
        return max(tokens, 1)
    if fits < SMALL_BLOCK:
        plan(min(tokens, SMALL_BLOCK), columns, costs, workspace_bytes)
    return fits // SMALL_BLOCK * SMALL_BLOCK


def block_rows(tokens: int, columns: int, costs: Costs, workspace_bytes: int, sum_bytes: int = 0) -> int:
    """Rows of a block (the last may have fewer) for the least estimated time: all tokens at once, with tiles computed
    again where they do not fit, or several blocks, each of which adds to the whole weight gradient.

    `sum_bytes`: memory of that sum, taken from the workspace as soon as there is more than one block.

    Raises ValueError, naming the least workspace, if no choice fits.
    """
    best, rows_of_best = float("inf"), tokens
    for parts in range(1, -(-tokens // SMALL_BLOCK) + 1):
        rows = tokens if parts == 1 else _rounded_rows(-(-tokens // parts))
        blocks = -(-tokens // rows)
        rest = workspace_bytes - (sum_bytes if blocks > 1 else 0)
        fits = (rest - rows * costs.row) // (rows * costs.element)
        if fits < min(_least(columns, costs), columns):
            continue
        cost = RECOMPUTED * max(0.0, 1 - fits / columns) + (blocks - 1) * BLOCK_OVERHEAD / tokens
        if cost < best:
            best, rows_of_best = cost, rows
    if tokens and best == float("inf"):
        # Without a sum the least block decides, with one all tokens at once: the sum alone takes too much.
        least = tokens if sum_bytes else min(tokens, SMALL_BLOCK)
        plan(least, columns, costs, workspace_bytes, ADVICE if sum_bytes else "")
    return max(rows_of_best, 1)


def _rounded_rows(rows: int) -> int:
    unit = LARGE_BLOCK if rows > LARGE_BLOCK else SMALL_BLOCK
    return -(-rows // unit) * unit


def _least(columns: int, costs: Costs) -> int:
    return min(MIN_COLUMNS, columns) * (2 if costs.scratch else 1)


def _whole_blocks(columns: int) -> int:
    return columns // COLUMN_BLOCK * COLUMN_BLOCK or columns


def _mib(size: int) -> int:
    return -(-size // 2**20)
