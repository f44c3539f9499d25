"""Compares figures of the train-rollout comparison with hand-computed numbers, and tests percentiles over several
workers."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from slime.algo.consistency import TokenSums, figures, order_statistics, percentile_ranks, token_sums

CLIP = {"eps_clip": 0.2, "eps_clip_high": 0.28}


def test_sums_of_four_tokens_by_hand():
    # d: 0 (same bits), 0.25 (ratio 1.284: above 1.28), 0.125, -0.25 (ratio 0.779: below 0.8)
    trainer, rollout = torch.tensor([-1.0, -0.5, -2.0, -3.0]), torch.tensor([-1.0, -0.75, -2.125, -2.75])
    sums = token_sums(trainer, rollout, **CLIP)
    assert (sums.tokens, sums.bitwise_equal, sums.clipped) == (4, 1, 2)
    assert (sums.dlogp, sums.abs_dlogp) == (0.125, 0.625)
    ratios = [1.0, math.exp(0.25), math.exp(0.125), math.exp(-0.25)]
    assert sums.ratio == pytest.approx(sum(ratios), rel=1e-12)
    assert sums.k3 == pytest.approx(sum(ratios) - 4 - 0.125, rel=1e-10)
    found = figures(sums, [0.125, 0.25, 0.25], 0.25)
    assert found == pytest.approx(
        {
            "dlogp_mean": 0.03125,
            "abs_dlogp_mean": 0.15625,
            "abs_dlogp_p50": 0.125,
            "abs_dlogp_p90": 0.25,
            "abs_dlogp_p99": 0.25,
            "abs_dlogp_max": 0.25,
            "ratio_mean": sum(ratios) / 4,
            "clip_fraction": 0.5,
            "k3": (sum(ratios) - 4.125) / 4,
            "bitwise_equal_tokens": 1,
        },
        rel=1e-10,
    )


def test_small_differences_keep_their_digits():
    """k3 of d is d*d/2 for small d: in float32, exp(1e-5) - 1 - 1e-5 would have no correct digit."""
    rollout = torch.full((3,), -0.5)
    trainer = rollout + torch.tensor([2.0**-17] * 3)
    sums = token_sums(trainer, rollout, **CLIP)
    assert sums.k3 / 3 == pytest.approx(2.0**-35, rel=1e-4)
    assert sums.abs_dlogp == 3 * 2.0**-17


def test_zero_and_minus_zero_are_different_bits():
    sums = token_sums(torch.tensor([0.0, -0.0]), torch.tensor([-0.0, -0.0]), **CLIP)
    assert (sums.bitwise_equal, sums.abs_dlogp) == (1, 0)


def test_no_token_gives_zero_sums_and_sums_add_up():
    empty = token_sums(torch.empty(0), torch.empty(0), **CLIP)
    assert empty == TokenSums()
    some = token_sums(torch.tensor([-1.0]), torch.tensor([-1.5]), **CLIP)
    assert empty + some == some
    assert (some + some).dlogp == 1.0


@pytest.mark.parametrize("count", [1, 2, 3, 100, 5000])
def test_order_statistics_are_those_of_a_sort(count):
    torch.manual_seed(count)
    values = (torch.randn(count) * torch.randint(-12, 3, (count,)).float().exp2()).abs()
    values[::3] = values[0]  # equal values
    values[-1] = 0.0
    wanted = values.sort()[0]
    ranks = sorted({0, count // 2, count - 1, *percentile_ranks(count)})
    assert order_statistics(values, ranks) == wanted[ranks].tolist()


def test_order_statistics_of_values_that_are_split():
    """Three workers meet at every sum, as ranks do in an all-reduce; one worker has no value at all."""
    torch.manual_seed(0)
    values = torch.rand(999).square()
    parts = [values[:10], values[10:10], values[10:]]
    ranks = percentile_ranks(999)
    barrier, given = threading.Barrier(len(parts)), {}

    def work(part):
        def add_up(counts):
            given[part.numel()] = counts.clone()
            barrier.wait(10)
            counts.copy_(sum(given.values()))
            barrier.wait(10)

        return order_statistics(part, ranks, add_up)

    with ThreadPoolExecutor(len(parts)) as pool:
        found = list(pool.map(work, parts))
    assert found == [values.sort()[0][ranks].tolist()] * 3


def test_percentile_ranks_by_hand():
    """The percentiles are nearest ranks: of 1 token that token, of 10 the 5th, 9th and 10th, of 100 the 50th, 90th
    and 99th."""
    assert percentile_ranks(1) == [0, 0, 0]
    assert percentile_ranks(10) == [4, 8, 9]
    assert percentile_ranks(100) == [49, 89, 98]
