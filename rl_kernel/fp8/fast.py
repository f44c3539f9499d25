"""The functions of `rl_kernel.fp8.reference` for a GPU: Triton quantisers, and the products of torch or Triton.

torch's products run for one weight on a GPU that has them. Triton's run for the weights of experts, for
`invariant=True`, and on other GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_kernel.fp8 import library
from rl_kernel.fp8.kernels import (
    Operand,
    RowGroups,
    multiply_columns,
    multiply_rows,
    quantize,
    quantize_blocks,
)

Upstream = tuple[Operand, Operand]
"""The output's gradient, rounded along its rows and its columns."""


@dataclass(frozen=True)
class RoundedWeights:
    """The rounded weights of `experts` experts. One of both forms may be missing."""

    plain: Operand | None
    turned: Operand | None
    experts: int
    dtype: torch.dtype


def round_weights(
    weights: Tensor, power_of_two: bool, plain: bool = True, turned: bool = True
) -> RoundedWeights:
    """Rounds weights [E, N, K] for `outputs` (`plain`) and `input_gradients` (`turned`), in one pass over them."""
    found = quantize_blocks(weights, plain=plain, turned=turned, power_of_two=power_of_two)
    return RoundedWeights(*found, len(weights), weights.dtype)


def outputs(
    x: Tensor, weights: RoundedWeights, ends: Tensor | None, power_of_two: bool, invariant: bool = False
) -> Tensor:
    """Computes `reference.outputs`. With `invariant`, a row's bits do not depend on the other rows."""
    rows, _ = quantize(x, None, rows=True, columns=False, power_of_two=power_of_two)
    assert rows is not None and weights.plain is not None
    return _multiply_rows(rows, weights.plain, ends, weights.experts, x.dtype, invariant)


def multiply(x: Tensor, weights: RoundedWeights, dtype: torch.dtype, power_of_two: bool) -> Tensor:
    """Computes `outputs` of one expert in `dtype`, with `invariant`. float32 is the unrounded sum."""
    rows, _ = quantize(x, None, rows=True, columns=False, power_of_two=power_of_two)
    assert rows is not None and weights.plain is not None
    return multiply_rows(rows, weights.plain, None, 1, dtype)


def round_upstream(upstream: Tensor, ends: Tensor | None, power_of_two: bool) -> Upstream:
    """Rounds the output's gradient along both axes, in one pass over it."""
    spans = None if ends is None else RowGroups.from_ends(ends, len(upstream))
    rows, columns = quantize(upstream, spans, rows=True, columns=True, power_of_two=power_of_two)
    assert rows is not None and columns is not None
    return rows, columns


def input_gradients(
    upstream: Upstream, weights: RoundedWeights, ends: Tensor | None, power_of_two: bool
) -> Tensor:
    """Computes `reference.input_gradients` in the dtype of the weights. Both operands are rounded already, so
    `power_of_two` has no effect."""
    assert weights.turned is not None
    return _multiply_rows(upstream[0], weights.turned, ends, weights.experts, weights.dtype)


def weight_gradients(upstream: Upstream, x: Tensor, ends: Tensor | None, power_of_two: bool) -> Tensor:
    """Computes `reference.weight_gradients`."""
    spans = None if ends is None else RowGroups.from_ends(ends, len(x))
    _, columns = quantize(x, spans, rows=False, columns=True, power_of_two=power_of_two)
    left = upstream[1]
    assert columns is not None
    if ends is None and len(x) and library.library_refusal(x.device) is None:
        return library.multiply_columns(left, columns, x.dtype)[None]
    return multiply_columns(left, columns, spans, 1 if ends is None else len(ends), x.dtype)


def _multiply_rows(
    rows: Operand,
    blocks: Operand,
    ends: Tensor | None,
    experts: int,
    dtype: torch.dtype,
    invariant: bool = False,
) -> Tensor:
    if ends is not None:
        return multiply_rows(rows, blocks, RowGroups.from_ends(ends, rows.rows), experts, dtype)
    if invariant or not rows.rows or library.library_refusal(rows.codes.device) is not None:
        return multiply_rows(rows, blocks, None, 1, dtype)
    return library.multiply_rows(rows, blocks, dtype)
