"""Tests the variable-length flash path of packed attention on one GPU, whole and in context-parallel slices."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from slime.data.token_slice import token_slice
from slime.megatron_backend.model.attention import (
    flash_attention,
    gather_keys,
    packed_layout,
    padded_attention,
)
from slime.megatron_backend.model.rows import take
from slime.megatron_backend.model.vision.whole_images import attend_to_whole_images, find_whole_images

pytestmark = pytest.mark.gpu

LENGTHS = [3, 700, 1, 64, 2048, 129]
HEADS, GROUPS, SIZE, SCALE = 8, 2, 128, 128**-0.5


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns query, key, value and the gradient of the output."""
    generator = torch.Generator("cuda").manual_seed(0)
    total = sum(LENGTHS)
    return tuple(
        torch.randn(total, heads, SIZE, device="cuda", generator=generator).to(dtype)
        for heads in (HEADS, GROUPS, GROUPS, HEADS)
    )


def with_gradients(q: Tensor, k: Tensor, v: Tensor, upstream: Tensor, parts: list, attention) -> list[Tensor]:
    """Returns output [T, A, D] and the gradients of q, k and v, joined (in float32) from all ranks' slices."""
    out = torch.zeros_like(q)
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    for part in parts:
        layout = packed_layout(part, "cuda")
        tokens = part.tokens.cuda()
        query, key, value = (leaf.to(q.dtype) for leaf in leaves)
        if layout.keys is not None:  # gather_keys gives these rows from all ranks
            empty = torch.zeros(part.size * part.rows, GROUPS, SIZE, dtype=q.dtype, device="cuda")
            everyone = (empty.index_copy(0, part.gathered.cuda(), x) for x in (key, value))
            key, value = (take(x, layout.keys) for x in everyone)
        of_rank = attention(query[tokens], key, value, layout, SCALE)
        of_rank.backward(upstream[tokens])
        out[tokens] = of_rank.detach()
    return [out, *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_slices_together_are_the_whole(size, window):
    """Against float32, slices are no worse than the whole in the same dtype, by the root mean square. Gradients of
    keys and values are sums with one rounded part per rank, so their limit is higher by half."""
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
        q, k, v, upstream = (x.to(dtype) for x in inputs(torch.bfloat16))
        # `to` returns the same tensor for the same dtype, and its gradient would be the sum of two runs.
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, sinks.to(dtype))]
        out = attention(*leaves[:3], layout, SCALE, window, sinks=leaves[3])
        out.backward(upstream)
        found[name] = [out.detach().float(), *(leaf.grad.float() for leaf in leaves)]
    for got, same_dtype, truth in zip(found["flash"], found["plain"], found["exact"], strict=True):
        error, allowed = ((x - truth).square().mean().sqrt() for x in (got, same_dtype))
        assert error <= 1.5 * allowed < 2e-2 * truth.square().mean().sqrt()


def test_a_rank_without_tokens_still_has_a_gradient():
    """A collective made its keys and values, and the other ranks wait in the backward of this collective."""
    layout = packed_layout(token_slice([3], rank=1, size=4), "cuda")
    q, k, v, _ = (x[:3].clone().requires_grad_() for x in inputs(torch.bfloat16))
    out = flash_attention(q[:0], k, v, layout, SCALE)
    assert out.shape == (0, HEADS, SIZE)
    out.sum().backward()
    for leaf in (q, k, v):
        assert leaf.grad is not None and not leaf.grad.any()


def shared(attention, dtype: torch.dtype, *, own: bool) -> list[Tensor]:
    """Returns output and gradients of tokens that are computed once: prompts of 400 for five sequences, of 90 for
    two. `own`: every sequence computes its own copy of the prompt."""
    lengths, prompts = [464, 401, 700, 90, 400, 633, 300], [(0, 0), (0, 400), (0, 400), (3, 0)]
    part = token_slice(lengths, prompts=[*prompts, (0, 400), (0, 400), (3, 90)])
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = (HEADS, GROUPS, GROUPS, HEADS)
    q, k, v, upstream = (
        torch.randn(len(part.tokens), n, SIZE, device="cuda", generator=generator).to(dtype) for n in sizes
    )
    leaves = [x.to(torch.promote_types(dtype, torch.float32)).requires_grad_() for x in (q, k, v)]
    query, key, value = (leaf.to(dtype) for leaf in leaves)
    tokens, copies = part.tokens.cuda(), part.gathered.cuda()
    if own:
        layout = packed_layout(token_slice(lengths), "cuda")
        out = attention(query[copies], key[copies], value[copies], layout, SCALE)[tokens]
    else:
        layout = packed_layout(part, "cuda")
        out = attention(query, *gather_keys(key, value, layout), layout, SCALE)
    out.backward(upstream)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize(
    ("attention", "dtype"), [(flash_attention, torch.bfloat16), (padded_attention, torch.float32)]
)
def test_a_shared_prompt_is_attended_to_as_copies_of_it_are(attention, dtype):
    """Against float64, shared prompts are no worse than copies in the same dtype, and each run gives the same
    output."""
    exact = shared(padded_attention, torch.float64, own=True)
    copies = shared(attention, dtype, own=True)
    found, again = (shared(attention, dtype, own=False) for _ in range(2))
    for got, same_dtype, truth in zip(found, copies, exact, strict=True):
        error, allowed = ((x - truth).square().mean().sqrt() for x in (got, same_dtype))
        assert 0 < allowed < 2e-2 * truth.square().mean().sqrt().clamp(min=1)
        assert error <= 1.2 * allowed
    assert torch.equal(found[0], again[0])


@pytest.mark.parametrize("window", [None, 300])
def test_tokens_of_an_image_see_the_whole_image(window):
    """Against float32, the kernel's rows and gradients are no worse than plain PyTorch in bfloat16, with slack."""
    part = token_slice(LENGTHS)
    first = sum(LENGTHS[:1])
    images = find_whole_images(part.runs, [(first + 4, first + 260), (first + 300, first + 556)], "cuda")

    def computed(dtype: torch.dtype, *, flash: bool) -> list[Tensor]:
        *rows, upstream = inputs(torch.bfloat16)
        q, k, v = (x.to(dtype).requires_grad_() for x in rows)
        out = attend_to_whole_images(torch.zeros_like(q), q, k, v, images, SCALE, window, None, flash=flash)
        out.backward(upstream.to(dtype))
        return [out.detach(), q.grad, k.grad, v.grad]

    exact = computed(torch.float32, flash=False)
    kernel, plain = computed(torch.bfloat16, flash=True), computed(torch.bfloat16, flash=False)
    for wanted, got, other in zip(exact, kernel, plain, strict=True):
        error, limit = ((x.float() - wanted).square().mean().sqrt() for x in (got, other))
        assert error <= 1.1 * limit
