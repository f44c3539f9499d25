"""Compares vime.view.statistics with known numbers: by hand, from tables, or drawn with a seed."""

from __future__ import annotations

import numpy as np
import pytest
from bench_cases import correlated
from switch_bench.verdicts import Metric, amount, metric_of, verdict

from vime.view import statistics
from vime.view.measures import number
from vime.view.statistics import Difference, student_quantile

TRIALS = 500
STEP_TIME = metric_of("perf/step_time")


def paired_difference(pairs, weights=None, *, relative: bool):
    """Calls it with equal weights if no weights are given."""
    equal = [tuple(np.ones(len(values)) for values in pair) for pair in pairs]
    return statistics.paired_difference(pairs, equal if weights is None else weights, relative=relative)


def summarise(repeats, weights=None, *, geometric: bool = False):
    equal = [np.ones(len(values)) for values in repeats]
    return statistics.summarise(repeats, equal if weights is None else weights, geometric=geometric)


def runs(rng, pairs: int, steps: int, *, gain: float = 0.0, run_sd: float, step_sd: float = 0.02):
    """Returns pairs of step times around 8 s; a run's own level varies by `run_sd`, its correlated steps by
    `step_sd`."""

    def run(level: float) -> np.ndarray:
        return 8 * level * (1 + run_sd * rng.normal()) * (1 + step_sd * correlated(rng, steps, 0.5))

    return [(run(1.0), run(1.0 - gain)) for _ in range(pairs)]


def shown(seed: int, pairs: int, steps: int, **known: float) -> float:
    """Returns the share of trials in which a difference is shown."""
    rng = np.random.default_rng(seed)
    found = [paired_difference(runs(rng, pairs, steps, **known), relative=True) for _ in range(TRIALS)]
    return sum(d is not None and d.shown for d in found) / TRIALS


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (10, 2.228), (30, 2.042), (1000, 1.962)],
)
def test_student_quantiles_are_those_of_the_tables(freedom, expected):
    assert student_quantile(freedom) == pytest.approx(expected, abs=1e-3)


def test_interval_over_repeats_by_hand():
    pairs = [(np.array([10.0, 12.0]), np.array([12.0, 12.0])), (np.array([5.0]), np.array([7.0]))]
    pairs.append((np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0, 6.0])))
    d = paired_difference(pairs, relative=False)  # 1, 2, 3: mean 2, standard deviation 1
    assert d.pairs == (1.0, 2.0, 3.0) and d.value == 2.0
    half = 4.303 / np.sqrt(3)
    assert (d.low, d.high) == (pytest.approx(2 - half, abs=1e-3), pytest.approx(2 + half, abs=1e-3))
    assert not d.shown and d.within == pytest.approx(2 + half, abs=1e-3)


def test_relative_differences_are_of_means_and_geometric():
    pairs = [
        (np.array([4.0, 6.0]), np.array([5.0, 5.0])),
        (2 * np.ones(1), np.ones(1)),
        (np.ones(1), 2 * np.ones(1)),
    ]
    d = paired_difference(pairs, relative=True)
    assert d.pairs == pytest.approx((0.0, -0.5, 1.0)) and d.value == pytest.approx(0.0)
    assert (1 + d.low) * (1 + d.high) == pytest.approx(1.0)  # over logs, so it is symmetric for ratios


def test_equal_sides_are_called_different_as_often_as_the_level_says_and_3_percent_are_found():
    assert 0.03 <= shown(1, 3, 20, run_sd=0.01) <= 0.07
    assert 0.03 <= shown(2, 5, 20, run_sd=0.01) <= 0.07
    assert shown(3, 5, 20, gain=0.03, run_sd=0.005) > 0.95
    assert shown(4, 3, 20, gain=0.03, run_sd=0.002, step_sd=0.01) > 0.9


def test_what_was_not_reported_is_left_out_of_both_sides():
    a, b = np.array([1.0, np.nan, 3.0, 100.0]), np.array([2.0, 50.0, 4.0, np.nan])
    d = paired_difference([(a, b)] * 3, relative=False)
    assert d.value == 1.0 and d.pairs == (1.0, 1.0, 1.0)
    assert paired_difference([(np.array([1.0, np.nan]), np.array([np.nan, 1.0]))], relative=False) is None
    assert summarise([np.array([np.nan, np.nan])]) is None
    assert summarise([np.array([np.nan, 4.0]), np.array([2.0])]).mean == 3.0


def test_fewer_than_three_pairs_have_no_interval_however_long_their_runs():
    """Steps of a run share its level. With an interval over steps, every third pair of equal sides would differ."""
    d = paired_difference(runs(np.random.default_rng(10), 2, 200, gain=0.05, run_sd=0), relative=True)
    assert d.low is None and d.high is None and not d.shown and d.within is None
    assert verdict(STEP_TIME, d) == ("fewer than 3 pairs, no verdict", False)


def test_steps_that_are_all_equal_need_no_interval():
    values = np.array([0.5, 0.7, 0.2])
    d = paired_difference([(values, values.copy())], relative=False)
    assert verdict(metric_of("rollout/raw_reward"), d)[0] == "equal"
    other = paired_difference([(values, values[::-1])], relative=False)  # the same mean from other steps
    assert verdict(metric_of("rollout/raw_reward"), other)[0].startswith("fewer than")


@pytest.mark.parametrize(
    ("name", "low", "high", "words"),
    [
        ("perf/step_time", -0.05, -0.01, "faster"),
        ("perf/step_time", 0.01, 0.05, "slower"),
        ("perf/step_time", -0.05, 0.01, "no difference shown (within 5.0 %)"),
        ("perf/step_tokens_per_sec", 0.01, 0.05, "faster"),
        ("perf/step_tokens_per_sec", -0.05, -0.01, "slower"),
        ("perf/trainer_peak_gib", -0.05, -0.01, "less memory"),
        ("perf/trainer_peak_gib", 0.0, 0.0, "equal"),
        ("perf/trainer_peak_gib", 1e-7, 2e-7, "same within 0.1 %"),  # 10 kB of 70 GiB, in every run
        ("rollout/raw_reward", 0.01, 0.05, "higher"),
        ("train/train_rollout_logprob_abs_diff", -0.05, -0.01, "lower"),
        ("train/ppo_kl", -0.05, 0.01, "no difference shown (within 5.0 %)"),
        ("train/grad_norm", 0.01, 0.05, "differs"),
    ],
)
def test_verdicts(name, low, high, words):
    differs = words in ("faster", "slower", "less memory", "higher", "lower", "differs")
    found = verdict(metric_of(name), Difference(True, (low + high) / 2, (), low, high))
    assert found == (words, differs)


def test_a_speed_is_all_tokens_by_all_seconds():
    seconds = (np.array([1.0, 3.0]), np.array([1.0, 1.0]))
    # 160 tokens take 4 s; the only step that reports a speed has 50.
    speeds = (np.array([100.0, 20.0]), np.array([50.0, np.nan]))
    assert summarise(speeds, seconds).repeats == pytest.approx((40.0, 50.0))
    whole = (speeds[0], np.array([60.0, 60.0]))
    d = paired_difference([whole], [seconds], relative=True)
    assert d.value == pytest.approx(60 / 40 - 1)
    # Only step 0 is reported by both.
    assert paired_difference([speeds], [seconds], relative=True).value == pytest.approx(50 / 100 - 1)


def test_columns_and_difference_of_relative_metrics_agree():
    """An outlier has a large weight in an arithmetic mean, and not in the mean of ratios, so both columns are
    geometric."""
    firsts, seconds = ([np.full(3, x) for x in side] for side in ((1.0, 1.0, 8.0), (1.1, 1.1, 4.0)))
    means = [summarise(side, geometric=True).mean for side in (firsts, seconds)]
    d = paired_difference(list(zip(firsts, seconds, strict=True)), relative=True)
    assert d.value == pytest.approx(means[1] / means[0] - 1) and means[0] == pytest.approx(2.0)


def test_metrics_by_name_and_numbers_as_a_reader_wants_them():
    assert metric_of("perf/step_time") == Metric("perf/step_time", "step", "s", False)
    assert metric_of("perf/sleep_time") == Metric("perf/sleep_time", "sleep time", "s", False)
    told = [number(x) for x in (0, 12345.6, 1234.5, 12.3456, 0.12345, 1.2345e-5, -7.829)]
    assert told == ["0", "12,346", "1,234", "12.35", "0.1235", "1.23e-05", "-7.829"]
    assert number(26.07, digits=2) == "26" and number(0.0123, "+") == "+0.0123"
    assert (number(999.96), number(999.94)) == ("1,000", "999.9")
    relative, absolute = (Difference(r, 0.03, (), None, None) for r in (True, False))
    assert amount(STEP_TIME, relative, -0.0314, "+") == "-3.1 %"
    assert amount(STEP_TIME, relative, 0.0005) == "0.05 %"
    assert amount(STEP_TIME, absolute, 0.25, "+") == "+0.25 s"
