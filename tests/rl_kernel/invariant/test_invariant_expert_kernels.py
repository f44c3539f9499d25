"""Tests the Triton kernels of layers of experts (in the interpreter without a GPU).

The interpreter multiplies tiles in float64 here (`products_in_float64`).
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import rl_kernel.invariant as invariant
from rl_kernel.invariant import kernels
from rl_kernel.invariant.kernels import experts
from rl_kernel.ops.expert_rows.kernels import gather_sum, spread
from rl_kernel.ops.expert_rows.reference import expert_rows

pytestmark = pytest.mark.usefixtures("device", "products_in_float64")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COUNTS = [3, 0, 70, 1, 0, 64, 17]
"""Rows of each expert. Some have none, one has a whole tile of 64 rows, and one has a few more."""


@pytest.mark.parametrize("tile", experts.TILES, ids=lambda tile: "x".join(map(str, tile[:5])))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_products_of_experts_have_the_bits_of_single_products(tile, dtype, monkeypatch):
    rows, ends = sum(COUNTS), torch.tensor(COUNTS).cumsum(0).int()
    x, weights = torch.randn(rows + 9, 96).half(), torch.randn(len(COUNTS), 136, 96).half()
    found = kernels.expert_products(x, ends, weights, dtype, tile)
    assert found.shape == (rows + 9, 136) and found.dtype == dtype
    parts = zip(x[:rows].split(COUNTS), weights, strict=True)
    wanted = torch.cat([kernels.linear(part, weight, None, tile, dtype) for part, weight in parts])
    assert torch.equal(found[:rows], wanted)
    monkeypatch.setattr(
        experts, "count_processors", lambda device: 3
    )  # several programs, each with several parts
    again = kernels.expert_products(x, ends, weights, dtype, tile)
    assert torch.equal(again[:rows], wanted)


def test_products_without_rows():
    weights = torch.randn(3, 16, 32).half()
    ends = torch.zeros(3, dtype=torch.int32)
    assert kernels.expert_products(torch.randn(0, 32).half(), ends, weights, torch.float32).shape == (0, 16)
    assert kernels.expert_products(torch.randn(4, 32).half(), ends, weights, torch.float32).shape == (4, 16)


def test_the_tile_follows_the_rows_of_an_expert():
    """The rows are those of a Qwen3-30B-A3B: 64 and 256 requests that decode, 2,048 tokens of prompts, and a
    micro-batch."""
    assert [experts.choose_tile(8 * tokens, 128) for tokens in (64, 256, 2048, 16384)] == list(experts.TILES)


@pytest.mark.parametrize("count, topk", [(7, 3), (128, 8), (60, 4), (8, 8)])
def test_the_chosen_experts_are_those_of_a_stable_sort(count, topk):
    logits = (torch.randn(33, count) * 2).round() / 2  # with equal logits
    logits[3] = 0
    logits[4, ::2] = -torch.inf
    wanted = logits.sort(dim=-1, descending=True, stable=True).indices[:, :topk].sort(dim=-1).values
    assert torch.equal(kernels.choose_experts(logits, topk), wanted)
    assert torch.equal(kernels.choose_experts(logits.repeat(1, 2)[:, :count], topk), wanted)
    assert kernels.choose_experts(logits[:0], topk).shape == (0, topk)


def test_tokens_whose_logits_are_no_numbers_have_experts():
    logits = torch.randn(2, 7)
    logits[0], logits[1, 2] = torch.nan, torch.nan
    ids = kernels.choose_experts(logits, 3)
    assert ids[0].tolist() == [0, 1, 2] and 2 not in ids[1].tolist()


@pytest.mark.parametrize("tokens", [0, 5, 2000])
def test_rows_of_pairs_equal_the_reference(tokens):
    """Some pairs are of experts on other ranks, and two experts have no pair. 2,000 tokens need two reads."""
    ids = torch.rand(tokens, 7).argsort(-1)[:, :3]
    ids = torch.where((ids == 5) | (ids == 2), -1, ids)
    rows, ends = kernels.expert_rows(ids, 7)
    wanted, counts = expert_rows(ids, 0, 7)
    assert torch.equal(rows, wanted)
    assert torch.equal(ends, counts.cumsum(0).int())


def test_a_layer_by_kernels_is_that_of_the_host():
    """The kernels run as on a GPU. The host computes the same float16 weights exactly."""
    tokens, hidden, width, count, topk = 41, 48, 32, 7, 3
    x, first = torch.randn(tokens, hidden).half(), (torch.randn(count, 2 * width, hidden) / 7).half()
    second, logits = (torch.randn(count, hidden, width) / 6).half(), torch.randn(tokens, count)
    ids = kernels.choose_experts(logits, topk)
    weights = logits.gather(1, ids).softmax(-1)
    rows, ends = kernels.expert_rows(ids, count)
    inputs, row_weights = spread(x, weights, rows, rows.numel())
    gated = invariant.swiglu(
        kernels.expert_products(inputs, ends, first, x.dtype).float(), row_weights
    ).half()
    outputs = kernels.expert_products(gated, ends, second, torch.float32)
    found, _ = gather_sum(outputs, None, rows, torch.float16)
    slots = invariant.fill_slots(outputs, rows)
    assert torch.equal(found, invariant.sum_slots(slots[None], torch.float16))
    if DEVICE == "cpu":
        wide = (x.float(), ids, weights, first.float(), second.float())
        wanted = invariant.sum_rows(*invariant.expert_outputs(*wide), torch.float32)
        torch.testing.assert_close(found.float(), wanted, rtol=0, atol=3e-3)
