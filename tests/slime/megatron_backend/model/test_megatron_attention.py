"""Compares packed attention with attention that is computed one sequence at a time."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from rl_kernel import rotary
from slime.data.token_slice import token_slice
from slime.megatron_backend.model.attention import PackedAttention, RotaryAngles, packed_layout, rotated
from slime.megatron_backend.model.attention_scores import Bucket


def one_by_one(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], window: int | None = None) -> Tensor:
    """softmax(q k^T / sqrt(D) + causal mask) v, a sequence and a head at a time, in float64. A token sees the newest
    `window` tokens."""
    heads, per_group = q.shape[1], q.shape[1] // k.shape[1]
    rows = []
    for qs, ks, vs in zip(*(x.double().split(lengths) for x in (q, k, v)), strict=True):
        mask = torch.full((len(qs), len(qs)), -math.inf, dtype=torch.float64).triu(1)
        if window is not None:
            mask += torch.full((len(qs), len(qs)), -math.inf, dtype=torch.float64).tril(-window)
        columns = []
        for head in range(heads):
            group = head // per_group
            scores = qs[:, head] @ ks[:, group].T / math.sqrt(q.shape[2]) + mask
            columns.append(scores.softmax(-1) @ vs[:, group])
        rows.append(torch.cat(columns, dim=-1))
    return torch.cat(rows)


def no_rotation(tokens: int, half: int) -> list[RotaryAngles]:
    return [RotaryAngles(torch.ones(tokens, 1, half), torch.zeros(tokens, 1, half))]


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("lengths", [[1], [7, 7, 7], [20, 1, 3, 19, 60, 2, 21]])
def test_values_and_gradients_match_single_sequences(lengths, kv_heads, window):
    torch.manual_seed(0)
    total = sum(lengths)
    q, k, v = (torch.randn(total, n, 8, requires_grad=True) for n in (4, kv_heads, kv_heads))
    layout = packed_layout(token_slice(lengths), "cpu")
    layout.rotary = no_rotation(total, 4)
    attention = PackedAttention(SimpleNamespace(kv_channels=8), window=window)
    out = attention(q, k, v, None, packed_seq_params=layout)
    expected = one_by_one(q, k, v, lengths, window)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)
    upstream = torch.randn(total, 32)
    grads = torch.autograd.grad(out, (q, k, v), upstream)
    for got, want in zip(grads, torch.autograd.grad(expected, (q, k, v), upstream.double()), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    again = attention(q, k, v, None, packed_seq_params=layout)
    assert torch.equal(out, again)
    for got, want in zip(torch.autograd.grad(again, (q, k, v), upstream), grads, strict=True):
        assert torch.equal(got, want)


def test_interleaved_pairs_give_the_scores_of_a_rotation_in_place():
    """Dimensions 2 k and 2 k + 1 of the first R turn by the same angle. Their order afterwards does not change a
    product of q and k. A layer without a rotary embedding gets its input."""
    torch.manual_seed(0)
    layout = packed_layout(token_slice([5, 2]), "cpu")
    angles = layout.positions[:, None, None] * torch.tensor([1.0, 0.3])
    layout.rotary = [RotaryAngles(angles.cos(), angles.sin(), interleaved=True)]
    q, k = torch.randn(2, 7, 3, 6)
    turned = []
    for x in (q, k):
        pairs = torch.view_as_complex(x[..., :4].unflatten(-1, (2, 2)).contiguous())
        pairs = pairs * torch.polar(torch.ones_like(angles), angles)
        turned.append(torch.cat([torch.view_as_real(pairs).flatten(-2), x[..., 4:]], -1))
    got = torch.einsum("ihd,jhd->hij", rotated(q, layout), rotated(k, layout))
    torch.testing.assert_close(got, torch.einsum("ihd,jhd->hij", *turned), rtol=0, atol=1e-5)
    assert rotated(q, layout, None) is q


def test_layout_by_hand():
    layout = packed_layout(token_slice([3, 1, 4]), "cpu")
    assert layout.cu_seqlens_q.tolist() == [0, 3, 4, 8] and layout.cu_seqlens_q.dtype == torch.int32
    assert (layout.qkv_format, layout.max_seqlen_q, layout.own) == ("thd", 4, 8)
    assert layout.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    # Buckets by length are {1}, {3} and {4}, and their rows follow each other.
    assert layout.buckets == [Bucket(1, 1, 1), Bucket(1, 3, 3), Bucket(1, 4, 4)]
    assert layout.query_slots.tolist() == layout.key_slots.tolist() == [1, 2, 3, 0, 4, 5, 6, 7]


def test_late_runs_have_few_queries():
    """A prompt has 6 tokens; one sequence ends with it, and two continue for 1 and 2 tokens."""
    part = token_slice([6, 7, 8], prompts=[(0, 0), (0, 6), (0, 6)])
    layout = packed_layout(part, "cpu")
    causal, one, two = layout.buckets
    assert causal == Bucket(1, 6, 6)
    assert one[:3] == (1, 1, 7) and two[:3] == (1, 2, 8)
    assert one.mask is not None and one.mask[0, 0].int().tolist() == [[1] * 7]
    assert two.mask is not None and two.mask[0, 0].int().tolist() == [[1] * 7 + [0], [1] * 8]
    assert layout.query_slots.tolist() == list(range(9)) and layout.key_slots.tolist() == list(range(21))


def test_similar_lengths_share_a_bucket_and_padding_is_bounded():
    layout = packed_layout(token_slice([24, 20, 18, 1000]), "cpu")
    assert layout.buckets == [Bucket(3, 24, 24), Bucket(1, 1000, 1000)]
    lengths = list(range(1, 500))
    layout = packed_layout(token_slice(lengths), "cpu")
    assert len(layout.buckets) <= 18 and sum(b.runs * b.keys for b in layout.buckets) < 1.5 * sum(lengths)
    assert layout.key_slots.unique().numel() == sum(lengths)  # no two tokens share a row


@pytest.mark.parametrize("lengths", [[], [3, 0, 2]])
def test_empty_sequences_are_refused(lengths):
    with pytest.raises(ValueError, match="lengths must be positive and at least one"):
        packed_layout(token_slice(lengths), "cpu")


def test_rotary_by_hand():
    """A quarter turn maps the pair (x1, x2) = (1, 2) to (-2, 1); no turn leaves it."""
    x = torch.tensor([[[1.0, 2.0]], [[1.0, 2.0]]])
    cos, sin = torch.tensor([1.0, 0.0]).view(2, 1, 1), torch.tensor([0.0, 1.0]).view(2, 1, 1)
    assert rotary(x, cos, sin).tolist() == [[[1.0, 2.0]], [[-2.0, 1.0]]]
