"""Tests cuDNN's attention in the trainer (`--attention-backend fused`) on one Hopper GPU."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slime.data.token_slice import token_slice
from slime.megatron_backend.model.attention import (
    PackedAttention,
    flash_attention,
    gather_keys,
    packed_layout,
    padded_attention,
)
from slime.megatron_backend.model.attention_scores import fused_attention, fused_batches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="cuDNN's attention is used on Hopper GPUs only",
    ),
]

LENGTHS = {
    "whole": [512, 512],
    "mixed": [1, 700, 129, 1500, 2048, 1023, 700, 1100, 3],
    "one": [1999],
}


def inputs(total: int, groups: int, size: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Returns query, key, value and the gradient of the output."""
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(total, heads, size, device="cuda", generator=generator).to(dtype)
        for heads in (8, groups, groups, 8)
    ]


def with_gradients(attention, rows: list[Tensor]) -> list[Tensor]:
    *given, upstream = rows
    leaves = [x.clone().requires_grad_() for x in given]
    out = attention(*leaves)
    out.backward(upstream)
    return [out.detach().float(), *(leaf.grad.float() for leaf in leaves)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("groups", "size"), [(2, 128), (8, 64), (1, 96)])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_cudnn_is_as_accurate_as_flash(lengths, groups, size, dtype):
    """Against float32, cuDNN's output and gradients are no worse than flash attention's, with slack."""
    rows, scale = inputs(sum(lengths), groups, size, dtype), size**-0.5
    layout = packed_layout(token_slice(lengths), "cuda")
    batches = layout.fused
    assert batches is not None
    exact = with_gradients(lambda *x: padded_attention(*x, layout, scale), [x.float() for x in rows])
    flash = with_gradients(lambda *x: flash_attention(*x, layout, scale), rows)
    fused = with_gradients(lambda *x: fused_attention(*x, batches, scale), rows)
    for got, other, truth in zip(fused, flash, exact, strict=True):
        error, allowed = ((x - truth).square().mean().sqrt() for x in (got, other))
        assert 0 < allowed < 2e-2 * truth.square().mean().sqrt()
        assert error <= 1.3 * allowed


def test_shared_prompts():
    """A group's prompt is computed once, so that the other samples begin after it."""
    part = token_slice([1500, 1400, 2048, 1024], prompts=[(0, 0), (0, 300), (0, 300), (0, 300)])
    layout, rows = packed_layout(part, "cuda"), inputs(len(part.tokens), 2, 128)
    batches = layout.fused
    assert batches is not None and batches.queries is not batches.keys

    def computed(attend, given: list[Tensor]) -> list[Tensor]:
        return with_gradients(lambda q, k, v: attend(q, *gather_keys(k, v, layout)), given)

    found = (
        computed(lambda *x: padded_attention(*x, layout, 0.1), [x.float() for x in rows]),
        computed(lambda *x: flash_attention(*x, layout, 0.1), rows),
        computed(lambda *x: fused_attention(*x, batches, 0.1), rows),
    )
    for truth, other, got in zip(*found, strict=True):
        error, allowed = ((x - truth).square().mean().sqrt() for x in (got, other))
        assert error <= 1.3 * allowed < 2e-2 * truth.square().mean().sqrt()


def test_a_gradient_with_other_strides():
    """torch's cache of graphs does not compare the strides of the gradient, so each must arrive contiguous."""
    rows = inputs(1024, 2, 128)
    batches = fused_batches([(0, 512), (0, 512)], "cuda")
    assert batches is not None

    def attend(*x: Tensor) -> Tensor:
        return fused_attention(*x, batches, 0.1)

    found = [
        with_gradients(attend, [*rows[:3], upstream])
        for upstream in (
            rows[3],
            rows[3].transpose(0, 1).contiguous().transpose(0, 1),
            torch.ones((), device="cuda", dtype=torch.bfloat16).expand_as(rows[3]),
            torch.ones_like(rows[3]),
        )
    ]
    for first, second in (found[:2], found[2:]):
        for a, b in zip(first, second, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_a_layer_uses_cudnn_also_under_recomputation(lengths, caplog):
    """A layer with --attention-backend fused runs cuDNN's kernels and logs no obstacle."""
    rows, layout = inputs(sum(lengths), 2, 128), packed_layout(token_slice(lengths), "cuda")
    config = SimpleNamespace(kv_channels=128, attention_backend=AttnBackend.fused)
    layer = PackedAttention(config, rope=None)  # type: ignore[arg-type]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return layer(q, k, v, None, packed_seq_params=layout).view_as(q)

    with caplog.at_level(logging.WARNING), torch.profiler.profile() as profile:
        plain = with_gradients(attend, rows)
        again = with_gradients(lambda *x: checkpoint(attend, *x, use_reentrant=True), rows)
    calls = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_cudnn_attention" in calls
    assert "aten::_flash_attention_forward" not in calls
    assert not [r for r in caplog.records if "fused" in r.getMessage()]
    assert torch.equal(plain[0], again[0])
    for a, b in zip(plain, again, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
