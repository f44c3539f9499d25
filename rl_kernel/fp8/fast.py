"""The functions of `rl_kernel.fp8.reference` for a GPU: Triton quantisers, and the products of torch, DeepGEMM or
Triton.

The chosen library (`choice`) multiplies for one weight on a GPU that has its products. DeepGEMM also multiplies rows
with the weights of experts. Triton multiplies for the other products of experts, for `invariant=True`, and on other
GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_kernel.fp8 import deepgemm, library
from rl_kernel.fp8.choice import uses_deepgemm
from rl_kernel.fp8.kernels import (
    Operand,
    RowGroups,
    add_columns,
    multiply_columns,
    multiply_rows,
    quantize,
    quantize_blocks,
)
from rl_kernel.stacked import add_stacked, addresses, is_addressable

Columns = tuple[Tensor, Tensor]
"""Codes and scales of values that are rounded along their columns."""
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
    exact = uses_deepgemm(weights.dtype)
    found = quantize_blocks(weights, plain=plain, turned=turned, power_of_two=power_of_two, exact=exact)
    return RoundedWeights(*found, len(weights), weights.dtype)


def outputs(
    x: Tensor, weights: RoundedWeights, ends: Tensor | None, power_of_two: bool, invariant: bool = False
) -> Tensor:
    """Computes `reference.outputs`. With `invariant`, a row's bits do not depend on the other rows."""
    spans = _groups(ends, x.shape[0])
    spaced = _spaces_rows(spans, x.dtype, invariant)
    rows, _ = quantize(x, spans, rows=True, columns=False, power_of_two=power_of_two, spaced=spaced)
    assert rows is not None and weights.plain is not None
    return _multiply_rows(rows, weights.plain, spans, weights.experts, x.dtype, invariant)


def outputs_and_columns(
    x: Tensor, weights: RoundedWeights, ends: Tensor | None, power_of_two: bool, invariant: bool = False
) -> tuple[Tensor, Columns]:
    """Computes `reference.outputs_and_columns`, with one pass over x."""
    spans = _groups(ends, x.shape[0])
    spaced = _spaces_rows(spans, x.dtype, invariant)
    rows, columns = quantize(x, spans, rows=True, columns=True, power_of_two=power_of_two, spaced=spaced)
    assert rows is not None and columns is not None and weights.plain is not None
    out = _multiply_rows(rows, weights.plain, spans, weights.experts, x.dtype, invariant)
    return out, (columns.codes, columns.scales)


def multiply(x: Tensor, weights: RoundedWeights, dtype: torch.dtype, power_of_two: bool) -> Tensor:
    """Computes `outputs` of one expert in `dtype`, with `invariant`. float32 is the unrounded sum."""
    rows, _ = quantize(x, None, rows=True, columns=False, power_of_two=power_of_two)
    assert rows is not None and weights.plain is not None
    return multiply_rows(rows, weights.plain, None, 1, dtype)


def round_upstream(upstream: Tensor, ends: Tensor | None, power_of_two: bool) -> Upstream:
    """Rounds the output's gradient along both axes, in one pass over it."""
    spans = _groups(ends, upstream.shape[0])
    spaced = _spaces_rows(spans, upstream.dtype, False)
    rows, columns = quantize(
        upstream, spans, rows=True, columns=True, power_of_two=power_of_two, spaced=spaced
    )
    assert rows is not None and columns is not None
    return rows, columns


def input_gradients(
    upstream: Upstream, weights: RoundedWeights, ends: Tensor | None, power_of_two: bool
) -> Tensor:
    """Computes `reference.input_gradients` in the dtype of the weights. Both operands are rounded already, so
    `power_of_two` has no effect."""
    assert weights.turned is not None
    rows = upstream[0]
    return _multiply_rows(
        rows, weights.turned, _groups(ends, rows.rows), weights.experts, weights.dtype, invariant=False
    )


def weight_gradients(
    upstream: Upstream, x: Tensor | Columns, ends: Tensor | None, power_of_two: bool, dtype: torch.dtype
) -> Tensor:
    """Computes `reference.weight_gradients`."""
    rows, left = upstream
    spans = _groups(ends, rows.rows)
    right = _get_columns(x, spans, power_of_two)
    if spans is None and rows.rows and library.library_refusal(left.codes.device) is None:
        return library.multiply_columns(left, right, dtype)[None]
    return multiply_columns(left, right, spans, 1 if ends is None else len(ends), dtype)


def add_weight_gradient(upstream: Upstream, x: Tensor | Columns, power_of_two: bool, total: Tensor) -> None:
    """Adds the gradient of one weight to `total` [N, K], without an earlier rounding."""
    left, right = upstream[1], _get_columns(x, None, power_of_two)
    if upstream[0].rows and is_addressable(total) and uses_deepgemm(torch.bfloat16):
        deepgemm.add_columns(left, right, total)
    else:
        total += multiply_columns(left, right, None, 1, total.dtype)[0]


def add_expert_gradients(
    upstream: Upstream, x: Tensor | Columns, ends: Tensor, power_of_two: bool, totals: Sequence[Tensor]
) -> None:
    """Adds the gradients of the experts' weights to `totals`, E float32 tensors [N, K], without an earlier rounding."""
    spans = _groups(ends, upstream[0].rows)
    left, right = upstream[1], _get_columns(x, spans, power_of_two)
    if all(is_addressable(total) for total in totals):
        add_columns(left, right, spans, addresses(totals))
    else:
        found = multiply_columns(left, right, spans, len(totals), torch.float32)
        add_stacked(totals, found)


def _get_columns(x: Tensor | Columns, spans: RowGroups | None, power_of_two: bool) -> Operand:
    if not isinstance(x, Tensor):
        return Operand(*x, x[0].shape[0])
    _, columns = quantize(x, spans, rows=False, columns=True, power_of_two=power_of_two)
    assert columns is not None
    return columns


def _spaces_rows(spans: RowGroups | None, dtype: torch.dtype, invariant: bool) -> bool:
    """Returns True if the rows of experts go to DeepGEMM, which reads each expert's rows from a multiple of 128."""
    return spans is not None and not invariant and uses_deepgemm(dtype)


def _multiply_rows(
    rows: Operand,
    blocks: Operand,
    spans: RowGroups | None,
    experts: int,
    dtype: torch.dtype,
    invariant: bool,
) -> Tensor:
    if invariant or not rows.rows:
        return multiply_rows(rows, blocks, spans, experts, dtype)
    if uses_deepgemm(dtype):
        if spans is None:
            return deepgemm.multiply_rows(rows, blocks)
        return deepgemm.multiply_expert_rows(rows, blocks, spans, experts)
    if spans is not None or library.library_refusal(rows.codes.device) is not None:
        return multiply_rows(rows, blocks, spans, experts, dtype)
    return library.multiply_rows(rows, blocks, dtype)


_latest: list[tuple[Tensor, int, RowGroups]] = []
"""The arguments and the result of the last call of `_groups`: both products of experts have the same groups."""


def _groups(ends: Tensor | None, rows: int) -> RowGroups | None:
    if ends is None:
        return None
    if not _latest or _latest[0][0] is not ends or _latest[0][1] != rows:
        _latest[:] = [(ends, rows, RowGroups.from_ends(ends, rows))]
    return _latest[0][2]
