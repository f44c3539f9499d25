"""Compares the attention that the benchmark gives to verl's trainer with torch's attention, sequence by sequence."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from verl_attention import packed_attention

pytestmark = pytest.mark.gpu


def test_packed_attention_of_verl_equals_attention_per_sequence():
    lengths = [1, 37, 300]
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, sum(lengths), 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for heads in (14, 2, 2)
    )
    positions = torch.cat([torch.arange(length, device="cuda") for length in lengths])[None]
    out, _ = packed_attention(None, q, k, v, None, position_ids=positions, scaling=0.125)
    out.float().square().sum().backward()
    grads = [x.grad.clone() for x in (q, k, v)]
    for x in (q, k, v):
        x.grad = None
    parts = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
    wanted = [
        scaled_dot_product_attention(*part, is_causal=True, scale=0.125, enable_gqa=True) for part in parts
    ]
    expected = torch.cat(wanted, dim=2).transpose(1, 2)
    expected.float().square().sum().backward()
    assert out.shape == (1, sum(lengths), 14, 64)
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)
    for mine, x in zip(grads, (q, k, v), strict=True):
        torch.testing.assert_close(mine, x.grad, atol=5e-2, rtol=5e-2)
