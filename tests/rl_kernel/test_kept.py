"""Tests the compact kept set: construction, rows, checks, and the plain mask by hand."""

import math

import pytest
import torch

from rl_kernel import mode
from rl_kernel.kept import KeptTokens, check_kept, kept_logits, repeated
from rl_kernel.vocab import VocabShard, take

KEPT = KeptTokens.from_lists([[4, 0], [], [3], [5, 1, 2]])
TARGETS = torch.tensor([0, 5, 3, 1])
NONE = -math.inf


def whole(columns):
    return VocabShard(0, columns, None, None, columns)


def test_from_lists():
    assert KEPT.ids.tolist() == [4, 0, 3, 5, 1, 2]
    assert KEPT.offsets.tolist() == [0, 2, 2, 3, 6]
    assert KEPT.ids.dtype == KEPT.offsets.dtype == torch.int64
    nothing = KeptTokens.from_lists([])
    assert nothing.ids.shape == (0,) and nothing.offsets.tolist() == [0]


def test_rows_share_the_ids():
    part = KEPT.rows(slice(1, 3))
    assert part.ids is KEPT.ids and part.offsets.tolist() == [2, 2, 3]
    assert KEPT.rows(slice(2, 2)).offsets.tolist() == [2]
    assert take(KEPT, slice(3, 99)).offsets.tolist() == [3, 6]
    assert take(None, slice(0, 1)) is None and take(0.5, slice(0, 1)) == 0.5


def test_mask_by_hand():
    tile = torch.arange(24.0).view(4, 6)
    assert kept_logits(tile, KEPT, whole(6)).tolist() == [
        [0, NONE, NONE, NONE, 4, NONE],
        [6, 7, 8, 9, 10, 11],
        [NONE, NONE, NONE, 15, NONE, NONE],
        [NONE, 19, 20, NONE, NONE, 23],
    ]


def test_mask_of_a_shard_and_of_some_rows():
    tile = torch.arange(6.0).view(3, 2)
    middle = VocabShard(2, 2, None, None, 6)
    assert kept_logits(tile, KEPT.rows(slice(1, 4)), middle).tolist() == [[0, 1], [NONE, 3], [4, NONE]]
    # Token 0 kept only ids 4 and 0, so columns 2 and 3 have no kept id.
    assert kept_logits(torch.zeros(1, 2), KEPT.rows(slice(0, 1)), middle).tolist() == [[NONE, NONE]]


def test_nothing_to_mask():
    tile = torch.ones(2, 3)
    assert kept_logits(tile, KeptTokens.from_lists([[], []]), whole(3)).eq(1).all()
    assert kept_logits(torch.ones(0, 3), KeptTokens.from_lists([]), whole(3)).shape == (0, 3)
    assert kept_logits(torch.ones(0, 6), KEPT.rows(slice(2, 2)), whole(6)).shape == (0, 6)
    assert kept_logits(torch.ones(2, 0), KeptTokens.from_lists([[1], []]), whole(1)).shape == (2, 0)


def test_truncated():
    assert KEPT.truncated.tolist() == [True, False, True, True]
    # If an end is wrong, only the existing ids count.
    assert KeptTokens(KEPT.ids, torch.tensor([0, 6, 9])).truncated.tolist() == [True, False]


def test_repeated():
    kept = KeptTokens.from_lists([[4, 4, 0, 4], [], [4], [0, 1, 0]])
    assert repeated(kept, 5).tolist() == [False, True, False, True, False, False, False, True]
    assert not repeated(KEPT, 6).any()
    assert repeated(KeptTokens.from_lists([[], []]), 6).shape == (0,)
    # Ids outside the vocabulary repeat one another, and no valid id.
    assert (
        repeated(KeptTokens.from_lists([[7, 1, -3], [0, 1]]), 5).tolist()
        == [False] * 2 + [True] + [False] * 2
    )
    # The ids of other blocks' tokens stay in the list and have no effect.
    assert repeated(kept.rows(slice(3, 4)), 5).tolist()[5:] == [False, False, True]


def test_good_sets_pass():
    check_kept(None, TARGETS, 6)
    check_kept(KEPT, TARGETS, 6)
    check_kept(KeptTokens(KEPT.ids.int(), KEPT.offsets), TARGETS.int(), 6)
    check_kept(KeptTokens.from_lists([[], [], [], []]), TARGETS, 6)
    check_kept(KeptTokens.from_lists([]), TARGETS[:0], 6)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (torch.ones(4, 6), "keep_mask must be a KeptTokens, got Tensor; use KeptTokens.from_lists"),
        (KeptTokens(KEPT.ids[None], KEPT.offsets), r"keep_mask.ids must have shape \[M\], got \[1, 6\]"),
        (
            KeptTokens(KEPT.ids.float(), KEPT.offsets),
            "keep_mask.ids must be one of int64, int32, got float32",
        ),
        (KeptTokens(KEPT.ids, KEPT.offsets[1:]), r"keep_mask.offsets must have shape \[5\], got \[4\]"),
        (KeptTokens(KEPT.ids, KEPT.offsets.int()), "keep_mask.offsets must be one of int64, got int32"),
        (KeptTokens(KEPT.ids.to("meta"), KEPT.offsets), "keep_mask.ids must be on cpu, got meta"),
        (
            KeptTokens(KEPT.ids, torch.tensor([0, 2, 2, 3, 5])),
            "keep_mask.offsets must rise from 0 to 6, the number of ids, got values from 0 to 5; give",
        ),
        (
            KeptTokens(KEPT.ids, torch.tensor([0, 3, 2, 3, 6])),
            "keep_mask.offsets must rise from 0 to 6, the number of ids, got values from 0 to 6, unsorted",
        ),
        (
            KeptTokens(KEPT.ids + 1, KEPT.offsets),
            r"keep_mask.ids must lie in \[0, 6\), got values from 1 to 6; give ids of the whole vocabulary",
        ),
        (
            KeptTokens.from_lists([[0], [], [2, 4], [5]]),
            "keep_mask.ids must hold each truncated token's target, got target 3 of token 2, which is not; add",
        ),
    ],
)
def test_bad_sets_are_named(kept, message):
    with pytest.raises(ValueError, match=message):
        check_kept(kept, TARGETS, 6)


def test_values_are_read_only_where_that_is_free(monkeypatch):
    bad = KeptTokens(KEPT.ids + 9, KEPT.offsets - 1)
    monkeypatch.setattr("rl_kernel.kept.reads_values", lambda tensor: False)
    check_kept(bad, TARGETS, 6)
    with pytest.raises(ValueError, match="keep_mask.ids must be one of"):
        check_kept(KeptTokens(KEPT.ids.float(), KEPT.offsets), TARGETS, 6)
    assert mode.reads_values(TARGETS)
