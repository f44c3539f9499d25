"""Tests the attention of vision towers over all frames on one GPU: its error compared with transformers' calls per
frame, for the head sizes of published towers, and towers with and without windows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slime.megatron_backend.model.vision.attention import NAME, batched_attention, register_frame_attention
from slime.megatron_backend.model.vision.towers import TOWERS
from slime.models.vision import Vision

pytestmark = pytest.mark.gpu

BOUNDS = [0, 64, 128, 129, 700, 1972, 2036]
HEADS = 4
SLACK = 1.2
"""Largest error of the kernel, divided by that of torch's attention per frame in the same dtype."""
SHAPES = {
    "qwen3_vl": {"depth": 2, "hidden_size": 288, "num_heads": 4, "deepstack_visual_indexes": [0]},
    "qwen2_5_vl": {"depth": 2, "hidden_size": 320, "num_heads": 4, "fullatt_block_indexes": [1]},
}


def per_frame(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    parts = (x.tensor_split(BOUNDS[1:-1]) for x in (q, k, v))
    frames = ([x.transpose(0, 1)[None] for x in frame] for frame in zip(*parts, strict=True))
    return torch.cat([scaled_dot_product_attention(*x, scale=scale)[0].transpose(0, 1) for x in frames])


def all_frames(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    from transformers import AttentionInterface

    bounds = torch.tensor(BOUNDS, device="cuda", dtype=torch.int32)
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    longest = max(b - a for a, b in itertools.pairwise(BOUNDS))
    attention = AttentionInterface()[register_frame_attention()]
    more = {"cu_seq_lens_q": bounds, "max_length_q": longest, "scaling": scale}
    return attention(torch.nn.Identity(), *heads, None, **more)[0][0]


def run(attention: Callable[..., Tensor], inputs: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Returns the output and the gradients of q, k and v, in float32."""
    *leaves, upstream = (x.clone().to(dtype) for x in inputs)
    out = attention(*(leaf.requires_grad_() for leaf in leaves), leaves[0].shape[-1] ** -0.5)
    out.backward(upstream)
    return torch.stack([out.detach(), *(leaf.grad for leaf in leaves)]).float()


@pytest.mark.parametrize("size", [64, 72, 80])
def test_all_frames_are_as_exact_as_one_by_one(size: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (BOUNDS[-1], HEADS, size)
    inputs = [torch.randn(shape, device="cuda", generator=generator).bfloat16() for _ in range(4)]
    exact = run(per_frame, inputs, torch.float32)
    error, plain = ((run(f, inputs, torch.bfloat16) - exact).norm() for f in (all_frames, per_frame))
    assert error <= SLACK * plain
    whole = run(lambda q, k, v, scale: batched_attention(q, k, v, BOUNDS, scale), inputs, torch.float32)
    torch.testing.assert_close(whole, exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", SHAPES)
def test_a_tower_calls_it_once_per_layer(kind: str) -> None:
    settings = {**SHAPES[kind], "out_hidden_size": 256, "intermediate_size": 512}
    vision = Vision(kind, settings, depth=1, hidden=0, ffn=0, heads=0, out=0, image_id=0)
    torch.manual_seed(0)
    tower: Any = TOWERS[kind].build(vision).cuda().eval().requires_grad_(False)
    config = tower.config
    grids = torch.tensor([[1, 16, 24], [3, 12, 8], [1, 32, 30]], device="cuda")
    width = config.patch_size**2 * config.temporal_patch_size * 3
    pixels = torch.randn(int(grids.prod(-1).sum()), width, device="cuda")
    tower.config._attn_implementation = "sdpa"
    exact = tower(pixels, grid_thw=grids).pooler_output
    tower.bfloat16()
    errors = {}
    for name in ("sdpa", register_frame_attention()):
        tower.config._attn_implementation = name
        rows = tower(pixels.bfloat16(), grid_thw=grids).pooler_output
        errors[name] = float((rows.float() - exact).norm())
    assert 0 < errors[NAME] <= SLACK * errors["sdpa"]
