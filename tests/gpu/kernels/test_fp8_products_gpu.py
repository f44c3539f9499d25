"""Tests linear layers in fp8 on a GPU at the shapes of published models: products of torch and of Triton against the
reference, rounded bits, rows alone and in a batch, and no waiting of the host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_kernel import fp8
from rl_kernel.fp8 import fast, library, reference
from rl_kernel.fp8.cases import LARGE, Fp8Case
from rl_kernel.fp8.kernels import multiply_columns, multiply_rows, quantize, quantize_blocks

pytestmark = pytest.mark.gpu
DENSE = [case for case in LARGE if not case.shares]
CLOSE = 2**-7
"""Largest error of a product in bfloat16, relative to its largest value: a rounding, and sums of 128 products with
fewer bits than float32."""
TOP = 64
"""Number of rows that the reference computes."""


def case_id(case: Fp8Case) -> str:
    return case.name


def largest_error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()


@pytest.mark.parametrize("case", LARGE, ids=case_id)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_rounded_bits_are_those_of_the_reference(case: Fp8Case, power_of_two: bool) -> None:
    x, weights, _ = case.tensors(torch.bfloat16, "cuda")
    rows, columns = quantize(x, None, rows=True, columns=True, power_of_two=power_of_two)
    assert rows is not None and columns is not None
    for found, (codes, scales) in (
        (rows, reference.quantize_rows(x, power_of_two)),
        (columns, reference.quantize_columns(x, power_of_two)),
    ):
        assert torch.equal(found.codes[: len(codes)].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(found.scales[: len(scales)], scales)
    _, blocks = quantize_blocks(weights[:1], power_of_two=power_of_two)
    assert blocks is not None
    codes, scales = reference.quantize_blocks(weights[0], power_of_two)
    assert torch.equal(blocks.codes.view(torch.uint8), codes.T.contiguous().view(torch.uint8))
    assert torch.equal(blocks.scales.T[:, : len(scales)], scales.T)


@pytest.mark.parametrize("case", DENSE, ids=case_id)
def test_torch_and_triton_multiply_as_the_reference(case: Fp8Case) -> None:
    x, weights, upstream = case.tensors(torch.bfloat16, "cuda")
    rows, columns = quantize(x, None, rows=True, columns=True, power_of_two=False)
    grad_rows, grad_columns = fast.round_upstream(upstream, None, False)
    blocks, turned = quantize_blocks(weights, power_of_two=False)
    assert rows is not None and columns is not None and blocks is not None and turned is not None
    wanted = (
        reference.outputs(x[:TOP], weights, None, False),
        reference.input_gradients(upstream[:TOP], weights, None, False),
        reference.weight_gradients(upstream[:, :128], x[:, :128], None, False, x.dtype)[0],
    )
    triton = (
        multiply_rows(rows, blocks, None, 1, x.dtype),
        multiply_rows(grad_rows, turned, None, 1, x.dtype),
        multiply_columns(grad_columns, columns, None, 1, x.dtype)[0],
    )
    assert library.library_refusal(x.device) is None
    by_torch = (
        library.multiply_rows(rows, blocks, x.dtype),
        library.multiply_rows(grad_rows, turned, x.dtype),
        library.multiply_columns(grad_columns, columns, x.dtype),
    )
    for number, want in enumerate(wanted):
        for found in (triton[number], by_torch[number]):
            part = found[:128, :128] if number == 2 else found[:TOP]
            assert largest_error(part, want) < CLOSE
        assert largest_error(by_torch[number], triton[number]) < CLOSE


@pytest.mark.parametrize("case", [case for case in LARGE if case.shares], ids=case_id)
def test_products_of_experts_are_those_of_one_expert(case: Fp8Case) -> None:
    x, weights, upstream = case.tensors(torch.bfloat16, "cuda")
    ends = case.ends("cuda")
    assert ends is not None
    out, columns = fp8.expert_outputs(x, fp8.round_experts(list(weights), False)[0], ends, columns=True)
    d_x, d_weights = fp8.expert_gradients(upstream, columns, list(weights), ends)
    assert d_x is not None and d_weights is not None
    for expert, rows in enumerate(reference.expert_slices(ends, x)):
        one = slice(expert, expert + 1)
        weight = fast.round_weights(weights[one], False)
        alone = fast.outputs(x[rows], weight, None, False, True)
        rounded = fast.round_upstream(upstream[rows], None, False)
        assert torch.equal(out[rows], alone)
        if len(alone):
            assert largest_error(d_x[rows], fast.input_gradients(rounded, weight, None, False)) < CLOSE
            want = fast.weight_gradients(rounded, x[rows], None, False, x.dtype)[0]
            assert largest_error(d_weights[expert], want) < CLOSE
        else:
            assert not d_weights[expert].any()


def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    x, weights, _ = DENSE[0].tensors(torch.bfloat16, "cuda")
    whole = fp8.linear(x, weights[0], invariant=True)
    for rows in (slice(0, 1), slice(77, 78), slice(100, 300), slice(16_383, 16_384)):
        assert torch.equal(fp8.linear(x[rows], weights[0], invariant=True), whole[rows])


@pytest.mark.parametrize("shares", [(), (100, 0, 156)], ids=["dense", "experts"])
def test_the_host_does_not_wait(shares: tuple[int, ...]) -> None:
    case = Fp8Case("few", 256, 256, 384, shares)
    x, weights, upstream = case.tensors(torch.bfloat16, "cuda")
    ends = case.ends("cuda")

    def step() -> None:
        both = fast.round_weights(weights, False)
        _, columns = fast.outputs_and_columns(x, both, ends, False)
        rounded = fast.round_upstream(upstream, ends, False)
        fast.input_gradients(rounded, both, ends, False)
        fast.weight_gradients(rounded, columns, ends, False, x.dtype)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
