"""The Triton kernels of `rl_kernel.fp8`. Importing this package imports Triton."""

from rl_kernel.fp8.kernels.products import add_columns, multiply_columns, multiply_rows
from rl_kernel.fp8.kernels.quantize import Operand, RowGroups, quantize, quantize_blocks

__all__ = [
    "Operand",
    "RowGroups",
    "add_columns",
    "multiply_columns",
    "multiply_rows",
    "quantize",
    "quantize_blocks",
]
