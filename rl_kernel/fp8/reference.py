"""The quantisers and products of `rl_kernel.fp8` in plain PyTorch: the definition of correct, on any device.

A product of two e4m3 numbers is a multiple of 2**-18 below 2**18, so the sum of 128 such products is exact in float64,
in any order. The partial sums of a product are therefore the same bits on every machine, and a row of the result
depends only on that row of the input and on the weight.

M rows, K inputs, N outputs, G groups of 128.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

GROUP = 128
"""Elements that share a scale, along a row or a column. The blocks of weights are GROUP x GROUP."""
MOST = 448.0
"""Largest number of float8_e4m3fn."""
Blocks: TypeAlias = list[tuple[Tensor, Tensor]]
"""The codes and scales per expert, from `quantize_blocks`."""
Columns: TypeAlias = tuple[Tensor, ...]
"""The codes and scales of `quantize_columns` per expert."""
SMALLEST = 1e-10
"""Lower bound of the largest value of a group, as in vLLM. It avoids a division by zero."""


def scales_from(largest: Tensor, power_of_two: bool = False) -> Tensor:
    """Returns the scales of groups, fp32, from the largest absolute value per group: `largest / 448`, or the next power
    of two that is not smaller."""
    # torch multiplies by the reciprocal of a number on a GPU, which may round differently; it divides by a tensor
    scales = largest.float().clamp(min=SMALLEST) / largest.new_full((), MOST, dtype=torch.float32)
    if not power_of_two:
        return scales
    # the exponent grows by one if any bit of the fraction is set
    return ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def quantize_rows(x: Tensor, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Maps x [M, K] to codes e4m3 [M, K] and scales fp32 [M, G], one scale per 1 x 128 elements. K is a multiple of
    128."""
    groups = x.detach().float().unflatten(-1, (x.shape[-1] // GROUP, GROUP))
    scales = scales_from(groups.abs().amax(-1), power_of_two)
    return (groups / scales[..., None]).to(torch.float8_e4m3fn).flatten(-2), scales


def quantize_columns(x: Tensor, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Maps x [M, K] to its transpose as `quantize_rows` returns it, with M padded by zeros to a multiple of 128."""
    return quantize_rows(pad(x.detach().T, (0, -len(x) % GROUP)), power_of_two)


def quantize_blocks(weight: Tensor, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Maps a weight [N, K] to codes e4m3 [N, K] and scales fp32 [N / 128, K / 128], one scale per 128 x 128 elements.
    N and K are multiples of 128."""
    rows, columns = weight.shape
    blocks = weight.detach().float().view(rows // GROUP, GROUP, columns // GROUP, GROUP)
    scales = scales_from(blocks.abs().amax((1, 3)), power_of_two)
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.view(rows, columns), scales


def product(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Computes `dequantized(left) @ dequantized(right).T`, rounded once to `dtype`: [M, K] and [N, K] -> [M, N].

    `left` has the codes and scales of `quantize_rows`, `right` those of `quantize_blocks` or `quantize_rows`. The sum
    has the order of the groups: `((p_0 + p_1) + p_2) + ...`, where each p is an exact sum of 128 products of codes
    times the two scales, in float64.
    """
    (codes, scales), (others, theirs) = left, right
    if len(theirs) != len(others):
        theirs = theirs.repeat_interleave(GROUP, 0)[: len(others)]
    total = torch.zeros(len(codes), len(others), dtype=torch.float64, device=codes.device)
    for group in range(scales.shape[1]):
        columns = slice(group * GROUP, (group + 1) * GROUP)
        part = codes[:, columns].double() @ others[:, columns].double().T
        total += part * (scales[:, group, None].double() * theirs[:, group].double())
    return total.to(dtype)


def round_weights(weights: Tensor, power_of_two: bool, plain: bool = True, turned: bool = True) -> Blocks:
    """Rounds weights [E, N, K]. Both products read one form here, so `plain` and `turned` have no effect."""
    return [quantize_blocks(weight, power_of_two) for weight in weights]


def _rounded(weights: Tensor | Blocks, power_of_two: bool) -> Blocks:
    return round_weights(weights, power_of_two) if isinstance(weights, Tensor) else weights


def outputs(
    x: Tensor, weights: Tensor | Blocks, ends: Tensor | None, power_of_two: bool, invariant: bool = True
) -> Tensor:
    """Computes `x[rows of e] @ weights[e].T` per expert e: x [M, K], weights [E, N, K] -> [M, N] in the dtype of
    x. A row's bits never depend on the other rows, with or without `invariant`."""
    parts = [
        product(quantize_rows(x[rows], power_of_two), blocks, x.dtype)
        for rows, blocks in zip(expert_slices(ends, x), _rounded(weights, power_of_two), strict=True)
    ]
    return torch.cat(parts)


def multiply(x: Tensor, weights: Blocks, dtype: torch.dtype, power_of_two: bool) -> Tensor:
    """Computes `outputs` of one expert in `dtype`. float64 is the unrounded sum."""
    return product(quantize_rows(x, power_of_two), weights[0], dtype)


def round_upstream(upstream: Tensor, ends: Tensor | None, power_of_two: bool) -> Tensor:
    """Returns the output's gradient in the form that both gradients read. Here, each rounds the gradient itself."""
    return upstream


def input_gradients(
    upstream: Tensor, weights: Tensor | Blocks, ends: Tensor | None, power_of_two: bool
) -> Tensor:
    """Computes `upstream[rows of e] @ weights[e]`: [M, N] and [E, N, K] -> [M, K]. Blocks of 128 x 128 have the same
    codes in the transposed weight."""
    parts = []
    for rows, (codes, scales) in zip(
        expert_slices(ends, upstream), _rounded(weights, power_of_two), strict=True
    ):
        rounded = quantize_rows(upstream[rows], power_of_two)
        parts.append(product(rounded, (codes.T, scales.T), upstream.dtype))
    return torch.cat(parts)


def outputs_and_columns(
    x: Tensor, weights: Tensor | Blocks, ends: Tensor | None, power_of_two: bool, invariant: bool = True
) -> tuple[Tensor, Columns]:
    """Computes `outputs`, and rounds x for `weight_gradients`."""
    columns = [quantize_columns(x[rows], power_of_two) for rows in expert_slices(ends, x)]
    out = outputs(x, weights, ends, power_of_two, invariant)
    return out, tuple(tensor for pair in columns for tensor in pair)


def weight_gradients(
    upstream: Tensor, x: Tensor | Columns, ends: Tensor | None, power_of_two: bool, dtype: torch.dtype
) -> Tensor:
    """Computes `upstream[rows of e].T @ x[rows of e]` from values that are rounded in groups of 128 of the expert's
    rows: [M, N] and [M, K] -> [E, N, K] in `dtype`. x may be rounded already, by `outputs_and_columns`."""
    parts = []
    for expert, rows in enumerate(expert_slices(ends, upstream)):
        if isinstance(x, Tensor):
            codes, scales = quantize_columns(x[rows], power_of_two)
        else:
            codes, scales = x[2 * expert : 2 * expert + 2]
        parts.append(product(quantize_columns(upstream[rows], power_of_two), (codes, scales), dtype))
    return torch.stack(parts)


def add_weight_gradient(upstream: Tensor, x: Tensor | Columns, power_of_two: bool, total: Tensor) -> None:
    """Adds the gradient of one weight to `total` [N, K], without an earlier rounding."""
    total += weight_gradients(upstream, x, None, power_of_two, torch.float64)[0]


def add_expert_gradients(
    upstream: Tensor, x: Tensor | Columns, ends: Tensor, power_of_two: bool, totals: Sequence[Tensor]
) -> None:
    """Adds the gradients of the experts' weights to `totals`, E tensors [N, K], without an earlier rounding."""
    found = weight_gradients(upstream, x, ends, power_of_two, torch.float64)
    for total, gradient in zip(totals, found, strict=True):
        total += gradient


def expert_slices(ends: Tensor | None, x: Tensor) -> Sequence[slice]:
    """Returns the rows per expert, or all rows of x without `ends`. The host waits for `ends`."""
    stops = [len(x)] if ends is None else ends.tolist()
    return [slice(first, last) for first, last in zip([0, *stops[:-1]], stops, strict=True)]
