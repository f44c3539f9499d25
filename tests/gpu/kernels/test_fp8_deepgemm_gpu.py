"""Tests DeepGEMM's products in fp8 on a Hopper GPU: against Triton's and the reference, sums in a buffer, experts, rows
that are no multiple of a tile, and no waiting of the host. DeepGEMM compiles about one kernel per shape."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from rl_kernel import fp8
from rl_kernel.fp8 import fast, reference
from rl_kernel.fp8.cases import LARGE, Fp8Case
from rl_kernel.fp8.kernels import multiply_columns, multiply_rows, quantize, quantize_blocks

pytest.importorskip("deep_gemm")

pytestmark = pytest.mark.gpu
CLOSE = 2**-7
"""Largest error of a product in bfloat16, relative to its largest value."""
CLOSE_SUM = 2**-9
"""Largest error of a sum in float32, relative to its largest value: the tensor cores add the 128 products of a group
with fewer bits than float32."""
TOP = 64
"""Number of rows that the reference computes."""
ODD = Fp8Case("odd_scales", 200, 384, 640)
"""3 and 5 scales per row of blocks, and 200 rows: no multiples of 4, 16 and 128."""
DENSE = [ODD, *(case for case in LARGE if case.name in ("qwen3_4b_qkv", "ragged_rows"))]
EXPERTS = [case for case in LARGE if case.name == "uneven_experts"]


@pytest.fixture(autouse=True)
def deepgemm() -> Iterator[None]:
    fp8.choose_products("deepgemm", torch.device("cuda"))
    yield
    fp8.choose_products("torch", torch.device("cuda"))


def case_id(case: Fp8Case) -> str:
    return case.name


def largest_error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()


@pytest.mark.parametrize("case", DENSE, ids=case_id)
def test_products_are_those_of_triton_and_the_reference(case: Fp8Case) -> None:
    x, weights, upstream = case.tensors(torch.bfloat16, "cuda")
    both, rounded = fast.round_weights(weights, False), fast.round_upstream(upstream, None, False)
    out, columns = fast.outputs_and_columns(x, both, None, False)
    d_x = fast.input_gradients(rounded, both, None, False)
    total = torch.ones(weights[0].shape, device="cuda")
    fast.add_weight_gradient(rounded, columns, False, total)
    rows, right = quantize(x, None, rows=True, columns=True, power_of_two=False)
    blocks, turned = quantize_blocks(weights, power_of_two=False)
    assert rows is not None and right is not None and blocks is not None and turned is not None
    d_weight = multiply_columns(rounded[1], right, None, 1, torch.float32)[0]
    for got, triton, want in (
        (
            out,
            multiply_rows(rows, blocks, None, 1, x.dtype),
            reference.outputs(x[:TOP], weights, None, False),
        ),
        (
            d_x,
            multiply_rows(rounded[0], turned, None, 1, x.dtype),
            reference.input_gradients(upstream[:TOP], weights, None, False),
        ),
    ):
        assert got.shape == triton.shape and got.dtype == torch.bfloat16
        assert largest_error(got, triton) < CLOSE
        assert largest_error(got[:TOP], want) < CLOSE
    assert largest_error(total - 1, d_weight) < CLOSE_SUM
    fast.add_weight_gradient(rounded, columns, False, total)
    assert largest_error(total - 1, 2 * d_weight) < CLOSE_SUM


@pytest.mark.parametrize("case", EXPERTS, ids=case_id)
def test_products_of_experts_are_those_of_triton(case: Fp8Case) -> None:
    x, weights, upstream = case.tensors(torch.bfloat16, "cuda")
    ends = case.ends("cuda")
    assert ends is not None
    out, columns = fp8.expert_outputs(x, fp8.round_experts(list(weights), False)[0], ends, columns=True)
    d_x, d_weights = fp8.expert_gradients(upstream, columns, list(weights), ends)
    assert d_x is not None and d_weights is not None
    sums = list(torch.ones(weights.shape, device="cuda"))
    again, none = fp8.expert_gradients(upstream, columns, list(weights), ends, weight_grads=sums)
    assert again is not None and torch.equal(again, d_x) and none is None
    assert largest_error(torch.stack(sums) - 1, d_weights) < CLOSE
    fp8.choose_products("torch", x.device)  # Triton computes experts
    other, columns = fp8.expert_outputs(x, fp8.round_experts(list(weights), False)[0], ends, columns=True)
    other_d_x, other_d_weights = fp8.expert_gradients(upstream, columns, list(weights), ends)
    assert other_d_x is not None and other_d_weights is not None
    assert out.shape == other.shape and largest_error(out, other) < CLOSE
    assert d_x.shape == other_d_x.shape and largest_error(d_x, other_d_x) < CLOSE
    assert torch.equal(d_weights, other_d_weights)


def test_a_layer_adds_the_gradient_of_its_weight() -> None:
    x, weights, upstream = ODD.tensors(torch.bfloat16, "cuda")
    found = []
    for total in (torch.zeros(weights[0].shape, device="cuda"), None):
        weight, given = nn.Parameter(weights[0].clone()), x.clone().requires_grad_()
        with fp8.keep_rounded(gradients=True):
            for _ in range(2):  # two micro-batches
                fp8.linear(given, weight, weight_grad=total).backward(upstream)
        assert weight.grad is not None
        found.append((given.grad, weight.grad.float() if total is None else total))
    (d_x, total), (other_d_x, d_weight) = found
    assert d_x is not None and other_d_x is not None and torch.equal(d_x, other_d_x)
    assert largest_error(total, d_weight) < CLOSE


def test_an_invariant_product_is_that_of_triton() -> None:
    x, weights, _ = ODD.tensors(torch.bfloat16, "cuda")
    ours = fp8.linear(x, weights[0], invariant=True)
    fp8.choose_products("torch", x.device)
    assert torch.equal(ours, fp8.linear(x, weights[0], invariant=True))


@pytest.mark.parametrize("case", [ODD, *EXPERTS], ids=case_id)
def test_the_host_does_not_wait(case: Fp8Case) -> None:
    x, weights, upstream = case.tensors(torch.bfloat16, "cuda")
    ends, total = case.ends("cuda"), torch.zeros(weights[0].shape, device="cuda")

    def step() -> None:
        both = fast.round_weights(weights, False)
        _, columns = fast.outputs_and_columns(x, both, ends, False)
        rounded = fast.round_upstream(upstream, ends, False)
        fast.input_gradients(rounded, both, ends, False)
        if ends is None:
            fast.add_weight_gradient(rounded, columns, False, total)
        else:
            fast.add_expert_gradients(rounded, columns, ends, False, [total] * len(weights))

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_launch_depends_on_the_address_of_the_input() -> None:
    """A launch with a known key uses the form that Triton compiled for addresses of multiples of 16 bytes."""
    memory = torch.randn(256 * 256 + 8, device="cuda").bfloat16()
    for offset in (0, 1, 8):
        x = memory[offset : offset + 256 * 256].view(256, 256)
        rows, columns = quantize(x, None, rows=True, columns=True, power_of_two=False)
        assert rows is not None and columns is not None
        for found, (codes, scales) in (
            (rows, reference.quantize_rows(x)),
            (columns, reference.quantize_columns(x)),
        ):
            assert torch.equal(found.codes.view(torch.uint8), codes.view(torch.uint8))
            assert torch.equal(found.scales, scales)
