"""How a workspace is spent: which columns of the logits are kept for the backward, how many are computed at a time.

Plain arithmetic over bytes. Legend: N tokens, V local columns.
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


def plan(tokens: int, columns: int, costs: Costs, workspace_bytes: int) -> Budget:
    """Columns to keep for all tokens at once.

    Raises ValueError, naming the least workspace, if not even a narrow tile of all tokens fits.
    """
    if tokens == 0:
        return Budget(columns, columns)
    fits = (workspace_bytes - tokens * costs.row) // (tokens * costs.element)
    if fits >= columns:
        return Budget(columns, columns)
    least = min(MIN_COLUMNS, columns) * (2 if costs.scratch else 1)
    if fits < least:
        need = tokens * (costs.row + least * costs.element)
        todo = f"give {tokens} tokens at least {_mib(need)} MiB, or pass fewer tokens at a time"
        raise invalid("workspace_bytes", f"be >= {need}", workspace_bytes, todo)
    if not costs.scratch:
        return Budget(_whole_blocks(fits), _whole_blocks(fits))
    tile = max(MIN_COLUMNS, fits // 4)
    return Budget(_whole_blocks(fits - tile), _whole_blocks(tile))


def block_bytes(columns: int, costs: Costs, rows: int = ROW_BLOCK) -> int:
    """Workspace of a block of rows whose logits are all live."""
    return rows * (costs.row + columns * costs.element)


def row_blocks(tokens: int, columns: int, costs: Costs, workspace_bytes: int) -> int:
    """Rows of a block whose logits all fit the workspace; blocks are of nearly equal size, in whole ROW_BLOCKs.

    Raises ValueError, naming the least workspace, if not even the smallest block fits.
    """
    if block_bytes(columns, costs, tokens) <= workspace_bytes:
        return max(tokens, 1)
    smallest = block_bytes(columns, costs)
    most = workspace_bytes // smallest
    if most == 0:
        todo = f"give it at least {_mib(smallest)} MiB"
        raise invalid("workspace_bytes", f"be >= {smallest}", workspace_bytes, todo)
    units = -(-tokens // ROW_BLOCK)
    blocks = -(-units // most)
    return -(-units // blocks) * ROW_BLOCK


def _whole_blocks(columns: int) -> int:
    return columns // COLUMN_BLOCK * COLUMN_BLOCK or columns


def _mib(size: int) -> int:
    return -(-size // 2**20)
