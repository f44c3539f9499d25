"""Tests figures of the audit on a GPU: the same order statistics and sums as on the host, and their time."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import rl_kernel.invariant as invariant
from slime.algo.consistency import order_statistics, percentile_ranks, token_sums

pytestmark = pytest.mark.gpu
TOKENS = 1 << 21


def test_figures_are_those_of_the_host():
    torch.manual_seed(0)
    rollout = -torch.rand(TOKENS)
    trainer = rollout + 1e-2 * torch.randn(TOKENS)
    trainer[::7] = rollout[::7]
    ranks = percentile_ranks(TOKENS)
    wanted = (trainer - rollout).abs().sort()[0][ranks].tolist()
    assert order_statistics((trainer.cuda() - rollout.cuda()).abs(), ranks) == wanted
    clip = {"eps_clip": 0.005, "eps_clip_high": 0.01}
    host, device = (
        dataclasses.asdict(token_sums(trainer.to(d), rollout.to(d), **clip)) for d in ("cpu", "cuda")
    )
    assert host["bitwise_equal"] >= TOKENS // 7 and 0 < host["clipped"] < TOKENS
    assert device == pytest.approx(host, rel=1e-9, abs=1e-6)


def test_operators_of_bitwise_runs_keep_their_promise():
    assert invariant.broken("cuda", torch.bfloat16) == []


def test_packed_attention_has_the_gradients_of_flash_attention():
    """The gradients are in bfloat16, for sequences of several lengths; the outputs differ by their rounding."""
    from torch.nn.attention.varlen import varlen_attn

    torch.manual_seed(0)
    lengths = [300, 1, 64, 517]
    first = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    heads = [torch.randn(sum(lengths), count, 64, device="cuda", dtype=torch.bfloat16) for count in (8, 2, 2)]
    bounds = (first, first)
    longest = (max(lengths), max(lengths))
    upstream = torch.randn_like(heads[0])
    found = []
    for operator in (
        lambda q, k, v: invariant.packed_attention(q, k, v, *bounds, *longest, 0.125),
        lambda q, k, v: varlen_attn(q, k, v, *bounds, *longest, scale=0.125, window_size=(-1, 0)),
    ):
        leaves = [x.clone().requires_grad_() for x in heads]
        out = operator(*leaves)
        out.backward(upstream)
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours.float(), wanted.float(), rtol=0.03, atol=0.02)
