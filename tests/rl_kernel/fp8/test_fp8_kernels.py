"""Compares the kernels of `rl_kernel.fp8` with its reference: rounded values bit for bit, and products (in Triton's
interpreter without a GPU)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from hardware_rounding import nearest  # noqa: F401

from rl_kernel.fp8 import fast, reference
from rl_kernel.fp8.cases import CASES
from rl_kernel.fp8.kernels import RowGroups, quantize, quantize_blocks

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.usefixtures("nearest"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE = {torch.float32: 2**-18 if DEVICE == "cpu" else 2**-9, torch.bfloat16: 2**-7}
"""Largest error of a product, relative to its largest value. The kernels add the groups in float32, the reference adds
them in float64. The tensor cores of a GPU add the 128 products of a group with fewer bits than float32."""


def codes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_kernels_round_to_the_bits_of_the_reference(case, power_of_two):
    x, weights, _ = case.tensors(torch.bfloat16, DEVICE)
    x[:1, :1] = 0
    x[:1, 128:256] = 0
    rows, columns = quantize(x, None, rows=True, columns=True, power_of_two=power_of_two)
    want, scales = reference.quantize_rows(x, power_of_two)
    assert torch.equal(codes(rows.codes[: len(x)]), codes(want)) and torch.equal(
        rows.scales[: len(x)], scales
    )
    want, scales = reference.quantize_columns(x, power_of_two)
    assert torch.equal(codes(columns.codes), codes(want)) and torch.equal(columns.scales, scales)
    forms = quantize_blocks(weights, power_of_two=power_of_two)
    for turned, found in zip((False, True), forms, strict=True):
        pairs = [reference.quantize_blocks(weight, power_of_two) for weight in weights]
        pairs = [(code.T, scale.T) if turned else (code, scale) for code, scale in pairs]
        assert torch.equal(codes(found.codes), codes(torch.cat([code for code, _ in pairs]).contiguous()))
        scales = torch.cat([scale for _, scale in pairs])
        assert torch.equal(found.scales.T[:, : scales.shape[1]], scales)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_products_are_those_of_the_reference(case, dtype):
    x, weights, upstream = case.tensors(dtype, DEVICE)
    ends = case.ends(DEVICE)
    plain = [tensor.float() for tensor in (x, weights, upstream)]
    both, rounded = fast.round_weights(weights, False), fast.round_upstream(upstream, ends, False)
    out, columns = fast.outputs_and_columns(x, both, ends, False)
    d_weights = fast.weight_gradients(rounded, columns, ends, False, dtype)
    assert torch.equal(out, fast.outputs(x, both, ends, False))
    assert torch.equal(d_weights, fast.weight_gradients(rounded, x, ends, False, dtype))
    for got, want in (
        (out, reference.outputs(plain[0], plain[1], ends, False)),
        (
            fast.input_gradients(rounded, both, ends, False),
            reference.input_gradients(plain[2], plain[1], ends, False),
        ),
        (d_weights, reference.weight_gradients(plain[2], plain[0], ends, False, torch.float32)),
    ):
        assert got.dtype == dtype and got.shape == want.shape
        largest = want.abs().max().item() if want.numel() else 0.0
        error = (got.float() - want).abs().max().item() if want.numel() else 0.0
        assert error <= CLOSE[dtype] * largest


@pytest.mark.parametrize("case", [case for case in CASES if case.shares], ids=lambda case: case.name)
@pytest.mark.parametrize("start", [0, 1], ids=["aligned", "unaligned"])
def test_gradients_of_experts_are_added_to_separate_buffers(case, start):
    """An address that is no multiple of 16 bytes is added by torch."""
    x, weights, upstream = case.tensors(torch.bfloat16, DEVICE)
    ends, size = case.ends(DEVICE), weights[0].numel()
    rounded = fast.round_upstream(upstream, ends, False)
    _, columns = fast.outputs_and_columns(x, fast.round_weights(weights, False), ends, False)
    memory = torch.ones(len(weights), size + 64, device=DEVICE)
    totals = [part[start : start + size].view(weights[0].shape) for part in memory]
    want = 1 + fast.weight_gradients(rounded, columns, ends, False, torch.float32)
    fast.add_expert_gradients(rounded, columns, ends, False, totals)
    assert torch.equal(torch.stack(totals), want)
    assert torch.equal(memory[:, start + size :], torch.ones_like(memory[:, start + size :]))


def test_groups_of_experts_by_hand():
    """Experts with 129, 0, 1 and 70 rows have 2, 0, 1 and 1 groups; 200 // 128 + 4 groups are allocated."""
    spans = RowGroups.from_ends(torch.tensor([129, 129, 130, 200], dtype=torch.int32, device=DEVICE), 200)
    assert spans.starts.tolist() == [0, 2, 2, 3, 4]
    assert spans.expert.tolist()[:4] == [0, 0, 2, 3]
    assert spans.first.tolist()[:4] == [0, 128, 129, 130]
    assert spans.last.tolist() == [129, 129, 130, 200, 0]
    assert spans.owner.view(5, 128).tolist() == [[expert] * 128 for expert in (0, 0, 2, 3, -1)]
    assert spans.slot.tolist() == [*range(129), 256, *range(384, 454)]


def test_rows_of_experts_may_start_at_multiples_of_128():
    case = CASES[4]
    x, ends = case.tensors(torch.bfloat16, DEVICE)[0], case.ends(DEVICE)
    spans = RowGroups.from_ends(ends, len(x))
    plain, columns = quantize(x, spans, rows=True, columns=True, power_of_two=False)
    spaced, same = quantize(x, spans, rows=True, columns=True, power_of_two=False, spaced=True)
    assert spaced.codes.shape == (5 * 128, 128) and spaced.scales.stride() == (1, 5 * 128)
    assert torch.equal(codes(spaced.codes)[spans.slot], codes(plain.codes)[: len(x)])
    assert torch.equal(spaced.scales[spans.slot], plain.scales[: len(x)])
    assert torch.equal(codes(same.codes), codes(columns.codes))


def test_blocks_may_have_no_scales_that_no_block_has():
    weights = CASES[3].tensors(torch.bfloat16, DEVICE)[1]
    for padded, exact in zip(
        quantize_blocks(weights, power_of_two=False),
        quantize_blocks(weights, power_of_two=False, exact=True),
        strict=True,
    ):
        inner = exact.codes.shape[1] // 128
        assert (
            exact.scales.T.is_contiguous() and exact.scales.shape[0] == inner and padded.scales.shape[0] == 4
        )
        assert torch.equal(exact.scales, padded.scales[:inner])


def test_a_row_has_the_same_bits_alone_and_in_a_batch():
    x, weights, _ = CASES[2].tensors(torch.bfloat16, DEVICE)
    rounded = fast.round_weights(weights, False)
    whole = fast.outputs(x, rounded, None, False, True)
    for row in (0, 77, 129):
        assert torch.equal(fast.outputs(x[row : row + 1], rounded, None, False, True)[0], whole[row])


def test_a_value_that_is_not_finite_stays_not_finite():
    x = CASES[3].tensors(torch.bfloat16, DEVICE)[0]
    x[3, 5] = float("nan")
    x[4, 6] = float("inf")
    for found in quantize(x, None, rows=True, columns=True, power_of_two=False):
        there = found.codes.float().isnan()
        assert sorted(there.nonzero().tolist()) in ([[3, 5], [4, 6]], [[5, 3], [6, 4]])
