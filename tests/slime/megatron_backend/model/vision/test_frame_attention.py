"""Compares the attention of towers over all frames at once with transformers' calls per frame: rows and gradients."""

from __future__ import annotations

import pytest
import torch
from family_cases import MULTIMODAL
from torch import Tensor, nn

from slime.megatron_backend.model.vision import attention
from slime.megatron_backend.model.vision.towers import TOWERS
from slime.models.vision import Vision

GRIDS = {
    "one image": [(1, 4, 8)],
    "equal images": [(1, 4, 8)] * 3,
    "a video between images": [(1, 4, 8), (3, 6, 4), (1, 10, 12)],
}


def build(kind: str) -> nn.Module:
    settings = {**MULTIMODAL[kind], "out_hidden_size": 48}
    vision = Vision(kind, settings, depth=1, hidden=0, ffn=0, heads=0, out=0, image_id=0)
    torch.manual_seed(0)
    return TOWERS[kind].build(vision)


def run(
    tower: nn.Module, kind: str, grids: list[tuple[int, int, int]], implementation: str
) -> tuple[Tensor, Tensor]:
    """Returns the rows of all projectors, and the gradients of all parameters."""
    tower.config._attn_implementation = implementation
    tower.zero_grad()
    config = tower.config
    width = config.patch_size**2 * config.temporal_patch_size * 3
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(sum(t * h * w for t, h, w in grids), width, generator=generator)
    output = TOWERS[kind].run(tower, {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)})
    rows = torch.cat([output.rows, *output.deep])
    (rows * torch.randn(rows.shape, generator=generator)).sum().backward()
    return rows.detach(), torch.cat([p.grad.flatten() for p in tower.parameters() if p.grad is not None])


@pytest.mark.parametrize("kind", sorted((MULTIMODAL.keys() & TOWERS.keys()) - {"gemma3"}))
def test_frames_at_once_are_frames_one_by_one(kind: str) -> None:
    tower = build(kind)
    assert tower.config._attn_implementation == attention.NAME, "the trainer's towers have this attention"
    for name, grids in GRIDS.items():
        rows, gradients = run(tower, kind, grids, attention.NAME)
        wanted_rows, wanted_gradients = run(tower, kind, grids, "sdpa")
        torch.testing.assert_close(rows, wanted_rows, rtol=0, atol=1e-5, msg=name)
        torch.testing.assert_close(gradients, wanted_gradients, rtol=1e-4, atol=1e-4, msg=name)


def test_a_patch_sees_its_frame_only() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, 2, 4, generator=generator) for _ in range(3))
    found = attention.batched_attention(q, k, v, [0, 3, 5, 8, 9], 0.5)
    for start, stop in ((0, 3), (3, 5), (5, 8), (8, 9)):
        scores = torch.einsum("qad,kad->aqk", q[start:stop], k[start:stop]) * 0.5
        wanted = torch.einsum("aqk,kad->qad", scores.softmax(-1), v[start:stop])
        torch.testing.assert_close(found[start:stop], wanted)
