"""Tests that context-parallel ranks compute the bits of whole sequences with the attention kernel of --rlk-bitwise, in
Triton's interpreter. tests/gpu/bitwise/test_bitwise_attention_gpu.py does the same on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slime.data.token_slice import token_slice
from slime.megatron_backend.model.attention import packed_layout
from slime.megatron_backend.model.rows import take

LENGTHS = [37, 1, 5, 220, 2, 90]
HEADS, GROUPS, SIZE = 8, 2, 16

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off: tests/gpu/bitwise")


@pytest.fixture
def attend(monkeypatch: pytest.MonkeyPatch, products_in_float64: None) -> Any:
    """Returns the trainer's attention on GPUs."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from slime.megatron_backend.bitwise.install import _attend_packed

    return _attend_packed


def gathered(part: Any, x: Tensor, layout: Any) -> Tensor:
    """Returns the rows of every run, from the concatenated rows of all ranks."""
    rows = x.new_full((part.size * part.rows, *x.shape[1:]), torch.nan)  # padding must not matter
    return take(rows.index_copy(0, part.gathered, x), layout.keys)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_the_bits_of_whole_sequences(attend, size, window):
    """With four ranks, two ranks exchange each head of keys."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(sum(LENGTHS), heads, SIZE).half() for heads in (HEADS, GROUPS, GROUPS))
    whole = attend(query, key, value, packed_layout(token_slice(LENGTHS), "cpu"), 0.25, window)
    by_keys, by_heads = (torch.full_like(whole, torch.nan) for _ in range(2))
    copied = [x.repeat_interleave(max(1, size // GROUPS), 1).chunk(size, 1) for x in (key, value)]
    for rank in range(size):
        part = token_slice(LENGTHS, rank=rank, size=size, multiple=4)
        layout = packed_layout(part, "cpu")
        keys = (gathered(part, x, layout) for x in (key, value))
        by_keys[part.tokens] = attend(query[part.tokens], *keys, layout, 0.25, window)
        heads = slice(rank * HEADS // size, (rank + 1) * HEADS // size)
        by_heads[:, heads] = attend(query[:, heads], *(x[rank] for x in copied), layout.whole, 0.25, window)
    assert torch.equal(by_keys, whole) and torch.equal(by_heads, whole)
