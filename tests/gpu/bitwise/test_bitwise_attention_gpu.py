"""Tests the attention of --rlk-bitwise on one GPU: windows against torch, paged against packed keys, and parts of a
sequence against the whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import rl_kernel.invariant as invariant
from slime.data.token_slice import token_slice
from slime.megatron_backend.bitwise.install import _attend
from slime.megatron_backend.model.attention import packed_layout
from slime.megatron_backend.model.rows import take

pytestmark = pytest.mark.gpu

LENGTHS = [3, 700, 1, 64, 1500, 129]
HEADS, GROUPS, SIZE, SCALE, PAGE = 8, 2, 64, 0.125, 16
WINDOWS = [None, 1, 64, 100, 4096]


@pytest.fixture
def inputs() -> Iterator[list[Tensor]]:
    """Returns queries, keys, values and the gradient of the output."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        yield [
            torch.randn(sum(LENGTHS), heads, SIZE, dtype=torch.bfloat16)
            for heads in (HEADS, GROUPS, GROUPS, HEADS)
        ]


def firsts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def packed(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    first = firsts(LENGTHS)
    return invariant.packed_attention(
        *(query, key, value, first, first, max(LENGTHS), max(LENGTHS), SCALE, window)
    )


def plain(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Computes every sequence in torch, with a mask."""
    parts = []
    for start, end in itertools.pairwise(firsts(LENGTHS).tolist()):
        q, k, v = (x[start:end].transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(HEADS // GROUPS, 0) for x in (k, v))
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        hidden = (distance < 0) | (distance >= (window or end))
        shares = (q @ k.mT * SCALE).masked_fill(hidden, -torch.inf).softmax(-1)
        parts.append((shares @ v).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("window", WINDOWS)
def test_values_and_gradients_are_those_of_a_softmax(inputs, window):
    """By the root mean square, the errors against float64 are at most 1.5 times those of torch in bfloat16. With a
    window of 1, the gradients of queries and keys are 0, up to float32's rounding."""
    *rows, upstream = inputs
    found = []
    for operator, dtype in (
        (packed, torch.bfloat16),
        (plain, torch.bfloat16),
        (plain, torch.float64),
    ):
        leaves = [x.to(dtype).clone().requires_grad_() for x in rows]
        out = operator(*leaves, window)
        out.backward(upstream.to(dtype))
        found.append([out.detach().double(), *(leaf.grad.double() for leaf in leaves)])
    for ours, torchs, true in zip(*found, strict=True):
        error, allowed = ((x - true).square().mean().sqrt() for x in (ours, torchs))
        assert error <= max(1.5 * allowed, 1e-4)


@pytest.mark.parametrize("window", [None, 100])
def test_keys_and_values_may_be_parts_of_one_tensor(inputs, window):
    """Context-parallel ranks gather keys and values together."""
    query, key, value, upstream = inputs
    leaves = [x.clone().requires_grad_() for x in (key, value)]
    packed(query, *leaves, window).backward(upstream)
    both = torch.cat((key, value), 1).requires_grad_()
    packed(query, *both.chunk(2, 1), window).backward(upstream)
    torch.testing.assert_close(both.grad, torch.cat([leaf.grad for leaf in leaves], 1))


def test_a_window_of_all_keys_changes_no_bit(inputs):
    query, key, value, _ = inputs
    assert torch.equal(packed(query, key, value, max(LENGTHS)), packed(query, key, value, None))


def paged(key: Tensor, value: Tensor, kept: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns keys, values and the table of pages, as in an engine that has freed the pages without a key from kept[s]
    on: page 0 replaces them in the table. Other entries of the cache are NaN."""
    pages = [-(-length // PAGE) for length in LENGTHS]
    cache = torch.full((sum(pages) + 5, GROUPS, PAGE, 2 * SIZE), torch.nan, dtype=torch.bfloat16)
    free = (torch.randperm(len(cache) - 1) + 1).split([*pages, 4])
    table = torch.zeros(len(LENGTHS), max(pages), dtype=torch.int32)
    for s, start in enumerate(firsts(LENGTHS)[:-1].tolist()):
        places = torch.arange(kept[s], LENGTHS[s])
        table[s, kept[s] // PAGE : pages[s]] = free[s][kept[s] // PAGE :].int()
        pairs = torch.cat((key, value), -1)[start + places]
        cache[table[s, places // PAGE].long(), :, places % PAGE] = pairs
    keys, values = cache.transpose(1, 2).split(SIZE, -1)
    return keys, values, table


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("queries", [[1] * 6, [3, 5, 1, 40, 900, 128]], ids=["decode", "part of the prompt"])
def test_paged_queries_have_the_bits_of_packed_ones(inputs, window, queries):
    query, key, value, _ = inputs
    whole, ends = packed(query, key, value, window), firsts(LENGTHS)[1:].tolist()
    kept = [max(0, n - count - (window or n) + 1) for n, count in zip(LENGTHS, queries, strict=True)]
    keys, values, table = paged(key, value, kept)
    last = torch.cat([torch.arange(end - count, end) for end, count in zip(ends, queries, strict=True)])
    found = torch.full_like(query[last], torch.nan)
    invariant.paged_attention(
        *(query[last], keys, values, found, table, firsts(queries), firsts(LENGTHS).diff()),
        *(max(queries), SCALE, window),
    )
    assert torch.equal(found, whole[last])


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("size", [2, 4])
def test_context_parallel_ranks_have_the_bits_of_whole_sequences(inputs, size, window):
    """Ranks gather keys, or exchange heads. With four ranks, two ranks exchange each head of keys."""
    query, key, value, _ = inputs
    whole = packed(query, key, value, window)
    by_keys, by_heads = (torch.full_like(whole, torch.nan) for _ in range(2))
    copied = [x.repeat_interleave(max(1, size // GROUPS), 1).chunk(size, 1) for x in (key, value)]
    with torch.device("cpu"):
        parts = [token_slice(LENGTHS, rank=rank, size=size, multiple=4) for rank in range(size)]
        layouts = [packed_layout(part, "cuda") for part in parts]
        everything = layouts[0].whole
    for rank, (part, layout) in enumerate(zip(parts, layouts, strict=True)):
        tokens, gathered = part.tokens.cuda(), part.gathered.cuda()
        rows = [x.new_zeros(size * part.rows, GROUPS, SIZE).index_copy(0, gathered, x) for x in (key, value)]
        keys = (take(x, layout.keys) for x in rows)
        by_keys[tokens] = _attend(query[tokens], *keys, layout, SCALE, window)
        heads = slice(rank * HEADS // size, (rank + 1) * HEADS // size)
        by_heads[:, heads] = _attend(query[:, heads], *(x[rank] for x in copied), everything, SCALE, window)
    assert torch.equal(by_keys, whole) and torch.equal(by_heads, whole)
