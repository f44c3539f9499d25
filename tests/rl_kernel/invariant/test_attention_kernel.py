"""Tests the attention kernel of rl_kernel.invariant (in the interpreter without a GPU): values, windows, and equal bits
of packed and paged keys and of parts of a sequence."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from rl_kernel.invariant import kernels, selfcheck
from rl_kernel.invariant.kernels.attention import FEW_ROWS

pytestmark = pytest.mark.usefixtures("device", "products_in_float64")

HEADS, GROUPS, SIZE, SCALE, PAGE = 4, 2, 16, 0.25, 16
LENGTHS = [70, 5, 300]
"""Number of keys per sequence. The last one has more queries than a tile, and some windows begin after a step of
keys."""
WINDOWS = [None, 1, 64, 100, 1000]


@pytest.fixture
def packed(device: None) -> Iterator[tuple[Tensor, ...]]:
    yield tuple(torch.randn(sum(LENGTHS), heads, SIZE).half() for heads in (HEADS, GROUPS, GROUPS))


def firsts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def computed(packed: tuple[Tensor, ...], window: int | None) -> tuple[Tensor, Tensor]:
    """Returns output and log-sum-exp of the whole sequences."""
    query, key, value = packed
    first, out, lse = firsts(LENGTHS), torch.empty_like(query), torch.empty(query.shape[1], len(query))
    kernels.attention(
        *(query, key, value, out, first, first.diff(), max(LENGTHS), SCALE),
        **{"first_key": first, "lse": lse, "window": window},
    )
    return out, lse


@pytest.mark.parametrize("window", WINDOWS)
def test_values_are_those_of_a_softmax(packed, window):
    out, lse = computed(packed, window)
    for start, end in itertools.pairwise(firsts(LENGTHS).tolist()):
        query, key, value = (x[start:end].double().transpose(0, 1) for x in packed)
        key, value = (x.repeat_interleave(HEADS // GROUPS, 0) for x in (key, value))
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        hidden = (distance < 0) | (distance >= (window or end))
        scores = (query @ key.mT * SCALE).masked_fill(hidden, -torch.inf)
        torch.testing.assert_close(lse[:, start:end], scores.logsumexp(-1).float(), rtol=1e-3, atol=1e-3)
        true = (scores.softmax(-1) @ value).transpose(0, 1)
        assert (out[start:end] - true).abs().max() < 2e-3


def test_a_window_of_all_keys_changes_no_bit(packed):
    for found, wanted in zip(computed(packed, max(LENGTHS)), computed(packed, None), strict=True):
        assert torch.equal(found, wanted)


def test_a_window_without_a_key_is_an_error(packed):
    with pytest.raises(ValueError, match="window must be None or at least 1, got 0"):
        computed(packed, 0)


def paged(packed: tuple[Tensor, ...], kept: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns keys, values and the table of pages. Keys before kept[s] of sequence s, and entries of no sequence, are
    NaN. A page without a kept key is page 0 in the table, as in an engine that has freed it."""
    _, key, value = packed
    first, pages = firsts(LENGTHS), sum(-(-length // PAGE) for length in LENGTHS)
    cache = torch.full((pages + 5, GROUPS, PAGE, 2 * SIZE), torch.nan).half()
    free = (torch.randperm(len(cache) - 1) + 1).tolist()
    table = torch.zeros(len(LENGTHS), 24, dtype=torch.int32)
    for s, length in enumerate(LENGTHS):
        for j in range(kept[s], length):
            if j == kept[s] or j % PAGE == 0:
                table[s, j // PAGE] = free.pop()
            cache[table[s, j // PAGE], :, j % PAGE] = torch.cat((key[first[s] + j], value[first[s] + j]), -1)
    keys, values = cache.transpose(1, 2).split(SIZE, -1)
    return keys, values, table


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("queries", [[1, 1, 1], [3, 5, 170]], ids=["decode", "part of the prompt"])
def test_paged_queries_have_the_bits_of_packed_ones(packed, window, queries):
    """The queries of decoding use the smaller tile. Memory that no query sees must not matter."""
    out, _ = computed(packed, window)
    oldest = [
        max(0, length - count - (window or length) + 1)
        for length, count in zip(LENGTHS, queries, strict=True)
    ]
    keys, values, table = paged(packed, oldest)
    last = [
        slice(int(end) - count, int(end)) for end, count in zip(firsts(LENGTHS)[1:], queries, strict=True)
    ]
    rows = torch.cat([packed[0][part] for part in last])
    found = torch.full_like(rows, torch.nan)
    kernels.attention(
        *(rows, keys, values, found, firsts(queries), firsts(LENGTHS).diff(), max(queries), SCALE),
        **{"table": table, "window": window},
    )
    assert torch.equal(found, torch.cat([out[part] for part in last]))


def test_keys_without_a_page_in_the_table_are_left_out(packed):
    """When vLLM starts, it makes sequences that are longer than its table. The memory after a row of this table has
    pages of NaN."""
    keys, values, table = paged(packed, [0] * len(LENGTHS))
    table[:, 2:] = 0
    lengths, queries = firsts(LENGTHS).diff(), packed[0][: len(LENGTHS)]
    found, wanted = torch.full_like(queries, torch.nan), torch.full_like(queries, torch.nan)
    for out, known in ((found, lengths), (wanted, lengths.clamp(max=2 * PAGE))):
        kernels.attention(
            *(queries, keys, values, out, firsts([1] * len(LENGTHS)), known, 1, SCALE), table=table[:, :2]
        )
    assert lengths.max() > 2 * PAGE and wanted.isfinite().all() and torch.equal(found, wanted)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shared", [1, 2])
def test_runs_of_queries_have_the_bits_of_their_sequences(packed, window, shared):
    """A context-parallel rank computes such runs, each with the keys up to its end. With fewer `shared` queries per
    key head, more key heads are copies, as where ranks exchange more heads than there are key heads."""
    out, lse = computed(packed, window)
    query, *others = packed
    key, value = (x.repeat_interleave(HEADS // GROUPS // shared, 1) for x in others)
    first = firsts(LENGTHS).tolist()
    runs = [(0, 0, 9), (0, 61, 70), (1, 3, 4), (2, 0, 75), (2, 225, 300)]
    tokens = torch.cat([torch.arange(first[s] + a, first[s] + b) for s, a, b in runs])
    seen = torch.cat([torch.arange(first[s], first[s] + b) for s, _, b in runs])
    bounds, keys = firsts([b - a for _, a, b in runs]), firsts([b for *_, b in runs])
    found, sums = torch.empty_like(query[tokens]), torch.empty(HEADS, len(tokens))
    kernels.attention(
        *(query[tokens], key[seen], value[seen], found, bounds, keys.diff(), 75, SCALE),
        **{"first_key": keys, "lse": sums, "window": window},
    )
    assert torch.equal(found, out[tokens]) and torch.equal(sums, lse[:, tokens])


def test_the_check_of_a_window_computes_rows_alone_with_the_smaller_tile():
    rows = selfcheck._packed_queries(lambda *shape: torch.randn(*shape).half(), selfcheck.TALL, 70)
    assert selfcheck.HEADS // selfcheck.GROUPS <= FEW_ROWS < selfcheck.TALL
    positions = torch.arange(selfcheck.TALL)
    few = [0, 1, 152, 303]
    assert torch.equal(rows(positions)[few], torch.cat([rows(positions[i : i + 1]) for i in few]))
