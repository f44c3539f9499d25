"""How a workspace is spent: which columns of the logits are kept for the backward, how many are computed at a time.

Plain arithmetic over bytes. Legend: N tokens, H hidden, V local columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl_kernel.checks import invalid

WORKSPACE_BYTES = 1536 * 2**20
"""Default bound: 1.5 GiB, where the three-product forms reach their speed for vocabularies of 150k."""
COLUMN_BLOCK = 256
ROW_BLOCK = 128
MIN_COLUMNS = 1024
"""A tile narrower than this spends more on adding up the gradient of `hidden` than on products."""


@dataclass(frozen=True)
class Budget:
    """Columns [0, kept) keep their tile until the backward; the others are computed again, `tile` at a time."""

    kept: int
    tile: int


def fixed_bytes(tokens: int, width: int, columns: int) -> int:
    """What no choice changes: float32 gradient of `hidden`, its scaled copy, and block sums with entropy."""
    return tokens * (width * 8 + -(-columns // COLUMN_BLOCK) * 8 + 64)


def plan(tokens: int, width: int, columns: int, element_bytes: int, workspace_bytes: int) -> Budget:
    """Raises ValueError, naming the least workspace, if not even a narrow tile of all tokens fits."""
    if tokens == 0:
        return Budget(columns, columns)
    fixed = fixed_bytes(tokens, width, columns)
    least = min(MIN_COLUMNS, columns)
    fits = (workspace_bytes - fixed) // (tokens * element_bytes)
    if fits >= columns:
        return Budget(columns, columns)
    if fits < 2 * least:
        need = fixed + 2 * least * tokens * element_bytes
        todo = f"give {tokens} tokens at least {-(-need // 2**20)} MiB, or pass fewer tokens at a time"
        raise invalid("workspace_bytes", f"be >= {need}", workspace_bytes, todo)
    # A quarter for tiles that pass through, the rest is kept.
    tile = max(least, fits // 4)
    return Budget(_whole_blocks(fits - tile), _whole_blocks(tile))


def block_bytes(width: int, columns: int, element_bytes: int, rows: int = ROW_BLOCK) -> int:
    """Workspace of a block of rows whose logits are all live."""
    return rows * columns * element_bytes + fixed_bytes(rows, width, columns)


def row_blocks(tokens: int, width: int, columns: int, element_bytes: int, workspace_bytes: int) -> int:
    """Rows of a block whose logits all fit the workspace; blocks are of nearly equal size, in whole ROW_BLOCKs.

    Raises ValueError, naming the least workspace, if not even the smallest block fits.
    """
    if block_bytes(width, columns, element_bytes, tokens) <= workspace_bytes:
        return max(tokens, 1)
    smallest = block_bytes(width, columns, element_bytes)
    most = workspace_bytes // smallest
    if most == 0:
        todo = f"give it at least {-(-smallest // 2**20)} MiB"
        raise invalid("workspace_bytes", f"be >= {smallest}", workspace_bytes, todo)
    units = -(-tokens // ROW_BLOCK)
    blocks = -(-units // most)
    return -(-units // blocks) * ROW_BLOCK


def _whole_blocks(columns: int) -> int:
    return columns // COLUMN_BLOCK * COLUMN_BLOCK or columns
