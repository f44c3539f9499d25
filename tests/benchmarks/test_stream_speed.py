"""Tests the benchmark of rollouts ahead: its lengths, its bound by hand, and its table. It starts no run."""

from __future__ import annotations

import json
import statistics

import matplotlib.image
import pytest
import stream_picture
import stream_speed
from lengths import MEDIAN, length_of

from slime.tracking.events import Events


def test_lengths_have_a_heavy_tail():
    lengths = sorted(length_of(i, 10**6) for i in range(20_000))
    assert statistics.median(lengths) == pytest.approx(MEDIAN, rel=0.05)
    assert lengths[int(0.99 * len(lengths))] == pytest.approx(20 * MEDIAN, rel=0.15)
    assert max(length_of(i, 50) for i in range(200)) == 50


def test_the_bound_of_two_rollouts_by_hand(monkeypatch):
    """The groups have one answer, and a batch has two groups. The lengths are 1, 9, 1, 1 s. Without rollouts
    ahead, the batches take 9 and 1 s to generate, and 2 s each to train. With one rollout ahead, the first
    batch has two answers of 1 s, and the answer of 9 s comes in the second batch.
    """
    monkeypatch.setattr(stream_speed, "PROMPTS", 2)
    monkeypatch.setattr(stream_speed, "ANSWERS", 1)
    monkeypatch.setattr(stream_speed, "WARM_UP", 1)
    monkeypatch.setattr(stream_speed, "length_of", lambda index, limit: (1, 9, 1, 1)[index])
    assert stream_speed.bound(0, 2, 1.0, 2.0) == pytest.approx(2 / 3)
    assert stream_speed.bound(1, 2, 1.0, 2.0) == pytest.approx(10 / 8)  # from 3 s to 9 + 2 s


def test_the_table_compares_runs_of_one_seed():
    parts = {"step": 2.0, "train_wait": 1.0, "train": 0.9, "update_weights": 0.1}
    runs = [
        {
            **{"staleness": staleness, "seed": seed, "tokens_per_s": speed, "tokens": 1.0, "parts_s": parts},
            **{"age": float(staleness), "oldest": float(staleness), "reward": 0.5},
            "idle": {"engine": 0.4, "manager": 0.9, "trainer": 0.5},
        }
        for staleness, seed, speed in ((0, 0, 100.0), (1, 0, 150.0), (1, 1, 300.0), (0, 1, 200.0))
    ]
    lines = stream_speed.table({"runs": runs, "bounds": {"0": 1.0, "1": 1.75}}).splitlines()
    assert "1.50 1.50" in lines[2] and " 1.75 " in lines[2] and "0.500 0.500" in lines[2]
    assert lines[3:] == [f"idle at staleness {n}: engine 40%, manager 90%, trainer 50%" for n in (0, 1)]


def test_idle_time_and_its_picture(tmp_path, monkeypatch):
    """In two steps of 10 s, 2 s have no group, a batch takes 1 s to hand over, and training and sending take 4 s."""
    clock = iter([100.0, 100.0, 100.0, 101.0, 106.0, 106.0, 107.0, 108.0, 109.0, 110.0])
    monkeypatch.setattr("slime.tracking.events.time.time", lambda: next(clock))
    folder = tmp_path / "staleness-0-seed-0"
    events = Events("any", str(folder))
    events.add("start", rollout=0)
    events.add("step", rollout=0, train_s=0.0, update_weights_s=0.0)
    events.add("drawn", groups=[0, 1], version=0)  # this event is at 1 s of the run
    events.add("ended", groups=[0])
    events.add("batch", rollout=1, groups=[0, 1], over_limit=0)
    events.add("handed", rollout=1)
    events.add("drawn", groups=[2], version=0)
    events.add("ended", groups=[1, 2])
    events.add("step", rollout=1, train_s=3.0, update_weights_s=1.0)
    events.close()
    idle = stream_picture.idle_shares(folder, 1)
    assert idle == pytest.approx({"engine": 0.2, "manager": 0.9, "trainer": 0.6})
    record = {"bounds": {"0": 1.0}, "runs": [{"seed": 0, "staleness": 0, "tokens_per_s": 5.0}]}
    (tmp_path / "record.json").write_text(json.dumps(record))
    out = tmp_path / "idle.png"
    argv = [str(tmp_path / "record.json"), "--work", str(tmp_path), "--warm-up", "1", "--out", str(out)]
    assert stream_picture.main(argv) == 0
    height, width, _ = matplotlib.image.imread(out).shape
    assert height > 300 and width > 1000


def test_the_table_of_rewards_has_the_last_rollouts_and_the_first_good_one():
    slow = [0.5, 0.8, *[0.95] * 10]
    runs = [
        {"staleness": staleness, "seed": seed, "rewards": curve}
        for staleness, seed, curve in ((0, 0, [0.95] * 12), (4, 0, slow), (4, 1, [0.5] * 12))
    ]
    lines = stream_speed.reward_table({"runs": runs}).splitlines()
    assert lines[1].split() == ["0", "0.9500", "0.9500", "0"]
    assert lines[2].split() == ["4", "0.9500", "0.5000", "0.7250", "2", "never"]


def test_older_samples_are_corrected_with_tis(tmp_path):
    for tis, used, other in (
        (True, "--use-tis", "--use-rollout-logprobs"),
        (False, "--use-rollout-logprobs", "--use-tis"),
    ):
        argv = stream_speed.command(tmp_path, tmp_path, 4, 0, 3, tis=tis)
        assert used in argv and other not in argv


def test_staleness_0_is_needed_for_the_ratios(capsys):
    assert stream_speed.main(["--staleness", "1,4"]) == 2
    assert "--staleness must include 0" in capsys.readouterr().err
