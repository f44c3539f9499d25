"""Tests the batches of `--attention-backend fused`. cuDNN needs a GPU, so torch's attention computes them here."""

from __future__ import annotations

import logging
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slime.data.token_slice import token_slice
from slime.megatron_backend.model.attention import (
    PackedAttention,
    gather_keys,
    packed_layout,
    padded_attention,
)
from slime.megatron_backend.model.attention_scores import (
    find_obstacle,
    fused_attention,
    fused_batches,
    plan_batches,
    round_length,
)

SCALE = 0.3


def test_rounded_lengths():
    assert [round_length(n) for n in (1, 128, 129, 1024, 1025, 2048, 2049, 4096, 4097, 32768, 32769)] == [
        *(128, 128, 256, 1024, 1152, 2048, 2304, 4096, 4608, 32768, 36864)
    ]
    lengths = range(1, 40000)
    rounded = [round_length(n) for n in lengths]
    assert all(a <= b for a, b in pairwise(rounded))
    assert all(0 <= r - n < max(128, n / 8) and r % 128 == 0 for n, r in zip(lengths, rounded, strict=True))
    assert len({r for r in rounded if r <= 32768}) == 48


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([4096, 4096], [(4096, [0, 1])]),
        ([4000, 130, 4096, 0, 3900, 200], [(256, [1, 5]), (4096, [0, 2]), (4096, [4])]),
        ([512] * 13, [(512, list(range(8))), (512, [8, 9, 10, 11]), (512, [12])]),
        ([], []),
    ],
)
def test_batches_have_powers_of_two(lengths, expected):
    assert list(plan_batches(lengths)) == expected


def test_whole_rows_are_not_copied():
    assert fused_batches([(0, 256), (0, 256)], "cpu") == ([(2, 256)], None, None)
    assert fused_batches([(0, 128), (0, 256)], "cpu") == ([(1, 128), (1, 256)], None, None)
    swapped = fused_batches([(0, 256), (0, 128)], "cpu")
    assert swapped is not None and swapped.queries is swapped.keys and swapped.keys is not None
    assert swapped.keys.rows.tolist() == [*range(256, 384), *range(256)]
    assert swapped.keys.slots.tolist() == [*range(128, 384), *range(128)]
    late = fused_batches([(0, 128), (2, 128)], "cpu")
    assert late is not None and late.keys is None and late.queries is not None
    assert late.queries.rows.tolist() == [*range(128), 128, 128, *range(128, 254)]
    assert late.queries.slots.tolist() == [*range(128), *range(130, 256)]


@pytest.mark.parametrize(
    ("runs", "fits"),
    [
        ([(0, 20)] * 50, False),
        ([(0, 108)], False),
        ([(0, 109)], True),
        ([(0, 128), (80, 128)], True),
        ([(80, 128)], False),
    ],
)
def test_too_much_padding(runs, fits):
    assert (fused_batches(runs, "cpu") is not None) == fits


def torch_kernel(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


PROMPTS = [(0, 0), (0, 100), (0, 100), (3, 0), (3, 50)]
"""The first tokens that a sequence shares with an earlier one."""


@pytest.mark.parametrize(
    ("lengths", "prompts"),
    [
        ((128, 128), ()),
        ((256,), ()),
        ((250, 120, 128), ()),
        ((300, 700, 380, 640), ()),
        ((256, 128, 250, 256), ()),
        ((300, 250, 380, 128, 128), PROMPTS),
        ((256, 256, 256, 256, 256), PROMPTS),
    ],
)
def test_batches_have_the_values_of_padded_attention(lengths, prompts):
    part = token_slice(lengths, prompts=prompts)
    layout = packed_layout(part, "cpu")
    generator = torch.Generator().manual_seed(0)
    q, k, v, upstream = (
        torch.randn(len(part.tokens), heads, 16, generator=generator, dtype=torch.float64)
        for heads in (4, 2, 2, 4)
    )
    batches = layout.fused
    assert batches is not None
    found = []
    for attend in (
        lambda *x: fused_attention(*x, batches, SCALE, torch_kernel),
        lambda *x: padded_attention(*x, layout, SCALE),
    ):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(leaves[0], *gather_keys(*leaves[1:], layout))
        out.backward(upstream)
        found.append([out.detach(), *(x.grad for x in leaves)])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_a_gradient_without_strides():
    """The gradient of a sum has strides of 0. cuDNN's graph must not get it."""
    strides = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out = torch_kernel(q, k, v, scale)
        out.register_hook(lambda grad: strides.append(grad.transpose(1, 2).is_contiguous()))
        return out

    q, k, v = (torch.randn(256, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    batches = fused_batches([(0, 128), (0, 128)], "cpu")
    assert batches is not None
    fused_attention(q, k, v, batches, SCALE, kernel).sum().backward()
    assert strides == [True]


def test_a_layer_logs_its_obstacle_once(caplog):
    layout = packed_layout(token_slice([128, 128]), "cpu")
    q, k, v = (torch.randn(256, heads, 8) for heads in (4, 2, 2))
    config = SimpleNamespace(kv_channels=8, attention_backend=AttnBackend.fused)
    with caplog.at_level(logging.WARNING):
        outputs = [
            PackedAttention(c, rope=None)(q, k, v, None, packed_seq_params=layout)  # type: ignore[arg-type]
            for c in (config, config, SimpleNamespace(kv_channels=8, attention_backend=AttnBackend.auto))
        ]
    assert [r.getMessage() for r in caplog.records] == [
        "--attention-backend fused has no effect where the layer runs on cpu in float32"
    ]
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize(
    ("size", "given", "reason"),
    [
        (128, (None, None, None), None),
        (128, (64, None, None), "the layer has a sliding window"),
        (128, (64, 30.0, torch.zeros(4)), "the layer has a sliding window and capped scores and sinks"),
        (192, (None, None, None), "heads have 192 and 192 dimensions, not a multiple of 8 up to 128"),
        (12, (None, None, None), "heads have 12 and 12 dimensions, not a multiple of 8 up to 128"),
    ],
)
def test_obstacles_of_a_layer(size, given, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    on_gpu = SimpleNamespace(shape=(1, 4, size), is_cuda=True, dtype=torch.bfloat16, device="cuda")
    assert find_obstacle(on_gpu, on_gpu, *given) == reason  # type: ignore[arg-type]


def test_only_hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    on_gpu = SimpleNamespace(shape=(1, 4, 128), is_cuda=True, dtype=torch.bfloat16, device="cuda")
    assert find_obstacle(on_gpu, on_gpu, None, None, None) == "the GPU is not of the Hopper generation"  # type: ignore[arg-type]
