"""Tests layers of experts of rl_kernel.invariant on a GPU, at the shape of Qwen3-30B-A3B: equal bits for any tile and
any batch, gradients, a CUDA graph, and a host that waits for nothing."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

import rl_kernel.invariant as invariant
from rl_kernel.invariant import kernels
from rl_kernel.invariant.kernels import experts

pytestmark = pytest.mark.gpu

HIDDEN, WIDTH, EXPERTS, TOPK = 2048, 768, 128, 8
BF16 = torch.bfloat16


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(BF16)


@pytest.fixture(scope="module")
def weights() -> tuple[Tensor, Tensor, Tensor]:
    """Returns the router, the first and the second weights."""
    return (
        draw(EXPERTS, HIDDEN, seed=1, scale=0.03),
        draw(EXPERTS, 2 * WIDTH, HIDDEN, seed=2, scale=0.02),
        draw(EXPERTS, HIDDEN, WIDTH, seed=3, scale=0.03),
    )


def layer(x: Tensor, weights: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    router, first, second = weights
    logits = invariant.router_logits(x, router)
    ids = invariant.choose_experts(logits, TOPK)
    shares = invariant.expert_weights(logits, ids, normalised=True)
    return invariant.sum_rows(*invariant.expert_outputs(x, ids, shares, first, second), x.dtype)


@pytest.mark.parametrize("tokens", [3, 100, 3000])
def test_products_have_the_bits_of_single_products(tokens, weights):
    """The last experts have no rows."""
    _, first, second = weights
    ids = torch.rand(tokens, EXPERTS - 5, device="cuda").argsort(-1)[:, :TOPK]
    rows, ends = kernels.expert_rows(ids, EXPERTS)
    stops = [0, *ends.tolist()]
    assert torch.equal(rows.flatten().sort().values, torch.arange(tokens * TOPK, device="cuda"))
    for weight, inner in ((first, HIDDEN), (second, WIDTH)):
        x = draw(tokens * TOPK, inner, seed=4)
        for dtype in (BF16, torch.float32):
            by_tile = [kernels.expert_products(x, ends, weight, dtype, tile) for tile in experts.TILES]
            assert all(torch.equal(by_tile[0], other) for other in by_tile[1:])
            for expert in (0, 7, EXPERTS - 6):
                mine = slice(stops[expert], stops[expert + 1])
                alone = kernels.linear(x[mine], weight[expert], None, dtype=dtype)
                assert torch.equal(by_tile[0][mine], alone)


def test_a_token_has_the_same_bits_in_any_batch(weights):
    x = draw(5000, HIDDEN, seed=5)
    whole = layer(x, weights)
    assert torch.equal(layer(x.flip(0), weights).flip(0), whole)
    for count in (1, 37, 600):
        assert torch.equal(layer(x[100 : 100 + count], weights), whole[100 : 100 + count])
    again = torch.cat([layer(part, weights) for part in x[:40].split(1)])
    assert torch.equal(again, whole[:40])


def test_values_are_those_of_float64(weights):
    x, (router, first, second) = draw(64, HIDDEN, seed=6), weights
    found = layer(x, weights)
    logits = invariant.router_logits(x, router).double()
    shares, ids = logits.softmax(-1).topk(TOPK)
    assert torch.equal(ids.sort().values, invariant.choose_experts(logits.float(), TOPK))
    shares /= shares.sum(-1, keepdim=True)
    total = torch.zeros(64, HIDDEN, dtype=torch.float64, device="cuda")
    for token in range(64):
        for expert, share in zip(ids[token].tolist(), shares[token], strict=True):
            gate, up = (first[expert].double() @ x[token].double()).chunk(2)
            total[token] += share * (second[expert].double() @ (torch.nn.functional.silu(gate) * up))
    assert (found - total).abs().max() < 0.02 * total.abs().max()


def test_a_cuda_graph_serves_other_tokens(weights):
    x = draw(64, HIDDEN, seed=7)
    held = x.clone()
    layer(held, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(held, weights)
    for seed in (8, 9):
        other = draw(64, HIDDEN, seed=seed)
        held.copy_(other)
        graph.replay()
        assert torch.equal(out, layer(other, weights))


def test_sigmoid_scores_have_the_same_bits_in_any_batch():
    """Also for logits at another address, and the choice is that of plain PyTorch."""
    logits, bias = draw(3000, EXPERTS, seed=7).float(), draw(EXPERTS, seed=8, scale=0.1).float()
    route = partial(invariant.route, topk=TOPK, normalised=True, sigmoid=True, bias=bias)
    ids, weights = route(logits)
    assert torch.equal(ids, (logits.sigmoid() + bias).topk(TOPK).indices.sort().values)
    torch.testing.assert_close(weights.sum(1), torch.ones_like(weights[:, 0]))
    for first, last in ((0, 1), (7, 8), (5, 18), (100, 1300)):
        part = route(
            torch.cat((logits[:1, :3].flatten(), logits[first:last].flatten()))[3:].view(-1, EXPERTS)
        )
        assert torch.equal(part[0], ids[first:last]) and torch.equal(part[1], weights[first:last])


def test_the_host_waits_for_nothing(weights):
    x = draw(300, HIDDEN, seed=10)
    layer(x, weights)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x, weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_sums_have_the_gradient_of_plain_sums():
    rows = torch.rand(50, TOPK * 2, device="cuda").argsort(-1)[:, :TOPK]
    rows, ends = kernels.expert_rows(torch.where(rows < 4, -1, rows), 2 * TOPK)
    count = int(ends[-1])
    outputs = draw(count, HIDDEN, seed=11).float().requires_grad_()
    slots = invariant.fill_slots(outputs, rows)
    upstream = draw(50, HIDDEN, seed=12)
    plain = partial(invariant.sum_slots, dtype=BF16)(slots[None])
    assert torch.equal(invariant.sum_rows(outputs.detach(), rows, BF16), plain)
    (wanted,) = torch.autograd.grad(plain, outputs, upstream)
    assert torch.equal(invariant.spread_rows(upstream, rows, count).float(), wanted)


def test_ranks_with_parts_of_the_experts_have_the_bits_of_one_rank(weights):
    """A rank does not write the rows of other ranks' experts. They hold NaN here, which must not matter."""
    x, (router, first, second) = draw(700, HIDDEN, seed=13), weights
    logits = invariant.router_logits(x, router)
    ids = invariant.choose_experts(logits, TOPK)
    shares = invariant.expert_weights(logits, ids, normalised=True)
    parts = []
    for start, stop in ((0, 32), (32, 33), (33, EXPERTS)):
        nan = torch.full((1 << 28,), torch.nan, device="cuda")
        del nan
        mine = torch.where((ids >= start) & (ids < stop), ids - start, -1)
        parts.append(
            invariant.fill_slots(
                *invariant.expert_outputs(x, mine, shares, first[start:stop], second[start:stop])
            )
        )
    assert torch.equal(invariant.sum_slots(torch.stack(parts), x.dtype), layer(x, weights))


def test_a_large_batch_has_the_bits_of_small_ones(weights):
    """The batch has more rows per expert than any other test, and the empty batch has none."""
    x = draw(10_000, HIDDEN, seed=14)
    assert torch.equal(layer(x, weights)[:64], layer(x[:64], weights))
    assert layer(x[:0], weights).shape == (0, HIDDEN)
