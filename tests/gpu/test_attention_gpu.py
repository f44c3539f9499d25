"""The variable-length flash path of packed attention, whole and in context-parallel slices, on one GPU."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from slime.data.token_slice import token_slice
from slime.megatron_backend.attention import flash_attention, packed_layout, padded_attention

pytestmark = pytest.mark.gpu

LENGTHS = [3, 700, 1, 64, 2048, 129]
HEADS, GROUPS, SIZE, SCALE = 8, 2, 128, 128**-0.5


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and the gradient of the output."""
    generator = torch.Generator("cuda").manual_seed(0)
    total = sum(LENGTHS)
    return tuple(
        torch.randn(total, heads, SIZE, device="cuda", generator=generator).to(dtype)
        for heads in (HEADS, GROUPS, GROUPS, HEADS)
    )


def with_gradients(q: Tensor, k: Tensor, v: Tensor, upstream: Tensor, parts: list, attention) -> list[Tensor]:
    """Output [T, A, D] and the gradients of q, k and v, put together (in float32) from the slices of all ranks."""
    out = torch.zeros_like(q)
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    for part in parts:
        layout = packed_layout(part, "cuda")
        tokens = part.tokens.cuda()
        query, key, value = (leaf.to(q.dtype) for leaf in leaves)
        if layout.keys is not None:  # what gather_keys makes of the rows of all ranks
            empty = torch.zeros(part.size * part.rows, GROUPS, SIZE, dtype=q.dtype, device="cuda")
            everyone = (empty.index_copy(0, part.gathered.cuda(), x) for x in (key, value))
            key, value = (x.index_select(0, layout.keys) for x in everyone)
        of_rank = attention(query[tokens], key, value, layout, SCALE)
        of_rank.backward(upstream[tokens])
        out[tokens] = of_rank.detach()
    return [out, *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_slices_together_are_the_whole(size, window):
    """Against float32, slices are no worse than the whole in the same dtype, by the root of the mean square. Gradients
    of keys and values are sums of one rounded part a rank, hence the half on top."""
    padded, flash = (functools.partial(f, window=window) for f in (padded_attention, flash_attention))
    exact = with_gradients(*(x.float() for x in inputs(torch.bfloat16)), [token_slice(LENGTHS)], padded)
    whole = with_gradients(*inputs(torch.bfloat16), [token_slice(LENGTHS)], flash)
    parts = [token_slice(LENGTHS, rank=rank, size=size, multiple=4) for rank in range(size)]
    found = with_gradients(*inputs(torch.bfloat16), parts, flash)
    for got, same_dtype, truth in zip(found, whole, exact, strict=True):
        error, allowed = ((x - truth).square().mean().sqrt() for x in (got, same_dtype))
        assert 0 < allowed < 2e-3 * truth.square().mean().sqrt().clamp(min=1)
        assert error <= 1.5 * allowed


@pytest.mark.parametrize("window", [None, 100])
def test_sinks(window):
    """The kernel's output and backward, rescaled by the sinks, are no worse than plain PyTorch in the same dtype."""
    sinks = torch.linspace(-2, 2, HEADS, device="cuda").bfloat16()
    layout = packed_layout(token_slice(LENGTHS), "cuda")
    found = {}
    for name, attention, dtype in (
        ("exact", padded_attention, torch.float32),
        ("plain", padded_attention, torch.bfloat16),
        ("flash", flash_attention, torch.bfloat16),
    ):
        *leaves, upstream = (
            x.to(dtype) for x in (*inputs(torch.bfloat16)[:3], sinks, inputs(torch.bfloat16)[3])
        )
        for leaf in leaves:
            leaf.requires_grad_()
        out = attention(*leaves[:3], layout, SCALE, window, sinks=leaves[3])
        out.backward(upstream)
        found[name] = [out.detach().float(), *(leaf.grad.float() for leaf in leaves)]
    for got, same_dtype, truth in zip(found["flash"], found["plain"], found["exact"], strict=True):
        error, allowed = ((x - truth).square().mean().sqrt() for x in (got, same_dtype))
        assert error <= 1.5 * allowed < 2e-2 * truth.square().mean().sqrt()


def test_a_rank_without_tokens_still_has_a_gradient():
    """Its keys and values came from a collective, whose backward the other ranks wait in."""
    layout = packed_layout(token_slice([3], rank=1, size=4), "cuda")
    q, k, v, _ = (x[:3].clone().requires_grad_() for x in inputs(torch.bfloat16))
    out = flash_attention(q[:0], k, v, layout, SCALE)
    assert out.shape == (0, HEADS, SIZE)
    out.sum().backward()
    for leaf in (q, k, v):
        assert leaf.grad is not None and not leaf.grad.any()
