"""Tests context-parallel slices of packed rows, by hand and by properties for any lengths."""

from __future__ import annotations

import pytest
import torch

from slime.backends.megatron_utils.cp_utils import get_logits_and_tokens_offset_with_cp
from slime.data.packing import pack
from slime.data.token_slice import TokenRun, token_slice

LENGTHS = [8, 3, 5, 1, 40]


def test_by_hand():
    """8 tokens form 4 runs of 2: rank 0 has the first and the last. 3 tokens have the bounds 0, 0, 1, 2, 3."""
    first, second = (token_slice([8, 3], rank=rank, size=2, multiple=4) for rank in (0, 1))
    assert first.runs == [TokenRun(0, 0, 2), TokenRun(0, 6, 8), TokenRun(1, 2, 3)]
    assert second.runs == [TokenRun(0, 2, 4), TokenRun(0, 4, 6), TokenRun(1, 0, 1), TokenRun(1, 1, 2)]
    assert first.tokens.tolist() == [0, 1, 6, 7, 10] and second.tokens.tolist() == [2, 3, 4, 5, 8, 9]
    assert first.rows == second.rows == 8  # the larger part, 6 tokens, as a multiple of 4
    assert first.gathered.tolist() == [0, 1, 8, 9, 10, 11, 2, 3, 12, 13, 4]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("multiple", [1, 4])
def test_every_token_is_one_ranks(size, multiple):
    parts = [token_slice(LENGTHS, rank=rank, size=size, multiple=multiple) for rank in range(size)]
    assert sorted(torch.cat([part.tokens for part in parts]).tolist()) == list(range(sum(LENGTHS)))
    assert len({part.rows for part in parts}) == 1 and parts[0].rows % multiple == 0
    gathered = torch.full((size * parts[0].rows,), -1)
    for rank, part in enumerate(parts):
        gathered[rank * part.rows : rank * part.rows + len(part.tokens)] = part.tokens
    for part in parts:
        assert gathered[part.gathered].tolist() == list(range(sum(LENGTHS)))
        assert [t for run in part.runs for t in range(run.start, run.stop)] == [
            int(t) - sum(LENGTHS[:s]) for t, s in zip(part.tokens, sequence_of(part.tokens), strict=True)
        ]


def sequence_of(tokens: torch.Tensor) -> list[int]:
    ends = torch.tensor(LENGTHS).cumsum(0)
    return torch.searchsorted(ends, tokens, right=True).tolist()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_causal_work_is_equal(size):
    """Each rank has equally many pairs of query and key of a long sequence."""
    parts = [token_slice([4096], rank=rank, size=size) for rank in range(size)]
    pairs = [sum(t + 1 for run in part.runs for t in range(run.start, run.stop)) for part in parts]
    assert max(pairs) - min(pairs) <= 4096 and sum(pairs) == 4096 * 4097 // 2
    assert {len(part.tokens) for part in parts} == {4096 // size}


def test_a_rank_may_have_nothing():
    part = token_slice([3], rank=1, size=4)
    assert part.runs == [] and part.tokens.numel() == 0 and part.rows == 2
    mine, rows = part.find_rows(torch.tensor([0, 1, 2]))
    assert mine.numel() == rows.numel() == 0


def test_pack_gives_each_rank_its_part():
    data = {
        "tokens": [torch.arange(10, 18), torch.arange(20, 23)],
        "response_lengths": [4, 1],
        "loss_masks": [torch.tensor([1, 0, 1, 1]), torch.tensor([1])],
    }
    packs = [pack(data, [0, 1], ["loss_masks"], device="cpu", cp_rank=r, cp_size=2) for r in (0, 1)]
    assert [b.tokens.tolist() for b in packs] == [[10, 11, 16, 17, 22, 0], [12, 13, 14, 15, 20, 21]]
    # The states at 3, 4, 5, 6 of the first sequence and at 1 of the second predict response tokens.
    assert [b.mine.tolist() for b in packs] == [[3], [0, 1, 2, 4]]
    assert [b.targets.tolist() for b in packs] == [[17], [14, 15, 16, 22]]
    for batch in packs:
        assert batch.tokens[batch.rows].tolist() == [t - 1 for t in batch.targets.tolist()]
        assert batch.sample_of_row.tolist() == [0, 0, 0, 0, 1]
        assert batch.columns["loss_masks"].tolist() == [1, 0, 1, 1, 1]
        assert batch.local(batch.columns["loss_masks"]).tolist() == [[1], [1, 0, 1, 1]][batch is packs[1]]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_hooks_see_the_response_tokens_that_pack_gives_a_rank(size):
    """The offsets of slime's cp_utils equal those of our runs, for prompts and responses of any length."""
    responses = [5, 1, 4, 1, 33]
    totals = [n + 1 for n in LENGTHS]
    tokens = [torch.arange(100 * i, 100 * i + n) for i, n in enumerate(totals)]
    data = {"tokens": tokens, "response_lengths": responses}
    for rank in range(size):
        batch = pack(data, list(range(5)), [], device="cpu", cp_rank=rank, cp_size=size)
        found = []
        for total, response, of_sample in zip(totals, responses, tokens, strict=True):
            longest, chunks, logits, places = get_logits_and_tokens_offset_with_cp(
                total, response, cp_rank=rank, cp_size=size
            )
            assert longest * 2 * size >= total and all(b - a <= longest * 2 for a, b in chunks)
            assert all(
                (a - 1, b - 1) == place or (a, b) == (0, 0)
                for (a, b), place in zip(places, logits, strict=True)
            )
            found += [of_sample[start:stop] for start, stop in places]
        assert torch.cat(found).tolist() == batch.targets.tolist()
    with pytest.raises(ValueError, match="qkv_format must be thd, got bshd"):
        get_logits_and_tokens_offset_with_cp(4, 2, "bshd", cp_rank=0, cp_size=2)
