"""Compares packed attention with attention that is computed one sequence at a time.

The batches of `--attention-backend fused` are computed by torch here, because cuDNN needs a GPU.
"""

from __future__ import annotations

import logging
import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rl_kernel import rotary
from slime.data.token_slice import token_slice
from slime.megatron_backend.model.attention import (
    PackedAttention,
    RotaryAngles,
    gather_keys,
    packed_layout,
    padded_attention,
    rotated,
)
from slime.megatron_backend.model.attention_scores import (
    Bucket,
    find_obstacle,
    fused_attention,
    fused_batches,
    plan_batches,
    round_length,
)

SCALE = 0.3


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


@pytest.mark.parametrize("lengths", [(1100, 1900, 600), (1024, 1024)])
def test_the_backward_keeps_padded_rows_and_the_packed_output(lengths):
    """slime.plan.layer_elements.padded_elements counts this. Whole rows have no second output."""
    batches, tokens = fused_batches([(0, n) for n in lengths], "cpu"), sum(lengths)
    assert batches is not None
    q, k, v = (torch.randn(tokens, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    weight, kept = torch.randn(64, 8, requires_grad=True), {}

    def keep(x: Tensor) -> Tensor:
        if x.is_floating_point() and x is not weight and x.shape[-1] != 8:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        fused_attention(q * 1, k * 1, v * 1, batches, SCALE, torch_kernel).flatten(1) @ weight
    padded = sum(count * length for count, length in batches.sizes)
    sums = padded * 4  # logsumexp of each query
    copies = tokens * 4 * 16 if batches.queries is not None else 0
    assert sum(x.nbytes() for x in kept.values()) == 4 * (padded * (2 * 4 + 2 * 2) * 16 + copies + sums)


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
        (192, (None, None, None), "heads have 192 dimensions, not a multiple of 8 up to 128"),
        (12, (None, None, None), "heads have 12 dimensions, not a multiple of 8 up to 128"),
    ],
)
def test_obstacles_of_a_layer(size, given, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    on_gpu = SimpleNamespace(shape=(1, 4, size), is_cuda=True, dtype=torch.bfloat16, device="cuda")
    assert find_obstacle(on_gpu, *given) == reason  # type: ignore[arg-type]


def test_only_hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    on_gpu = SimpleNamespace(shape=(1, 4, 128), is_cuda=True, dtype=torch.bfloat16, device="cuda")
    assert find_obstacle(on_gpu, None, None, None) == "the GPU is not of the Hopper generation"  # type: ignore[arg-type]
