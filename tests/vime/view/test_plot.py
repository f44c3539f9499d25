"""Tests `vime plot` on synthetic runs: its inputs, its figures, and the pictures that it writes and leaves out."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
from matplotlib.image import imread

from slime.tracking.metrics import LOGPROB_DIFF, LOGPROB_DIFF_MAX
from vime.view import plot
from vime.view.run_metrics import UNMEASURED, load_run, running_mean, smoothing_window, step_times

PICTURES = ("reward", "step_time", "logprob_diff", "kl", "response_length", "loss", "grad_norm", "overview")


def write_run(directory, steps: int, seed: int = 0, drop: tuple[str, ...] = ()):
    """Writes a run as the loop logs it: 2 optimizer steps per rollout, an evaluation every 10 rollouts."""
    directory.mkdir(parents=True)
    draw = random.Random(seed)
    lines = []

    def log(step_key: str, step: int, **metrics: float) -> None:
        kept = (
            {name: value for name, value in metrics.items() if not name.startswith(drop)} if drop else metrics
        )
        lines.append({"step_key": step_key, "step": step, "time": 1.0 * step, **kept})

    for step in range(steps):
        reward = 0.35 + 0.3 * step / steps
        for i in (0, 1):
            diff = 10 ** draw.uniform(-7.2, -6.8)
            train = {
                "train/loss": draw.gauss(0, 0.01),
                "train/grad_norm": abs(draw.gauss(0.5, 0.1)),
                "train/ppo_kl": abs(draw.gauss(1e-4, 5e-5)) * i,
                "train/kl_loss": 1e-3 * step / steps,
                LOGPROB_DIFF: diff,
                LOGPROB_DIFF_MAX: diff * draw.uniform(8, 30),
            }
            log("train/step", 2 * step + i, **train)
        times = {
            "train_wait": draw.gauss(3, 0.3),
            "log_probs": 0.4,
            "forward": draw.gauss(0.5, 0.1),
            "backward": draw.gauss(1.0, 0.1),
            "update_weights": 0.3,
        }
        rollout = {
            "rollout/raw_reward": reward + draw.gauss(0, 0.04),
            "rollout/response_len/mean": 12 + draw.gauss(0, 0.3),
            "rollout/response_len/max": draw.choice([16, 20, 24]),
            "perf/step_time": sum(times.values()) + 0.4,
            **{f"perf/{name}_time": seconds for name, seconds in times.items()},
        }
        log("rollout/step", step, **rollout)
        if step % 20 == 19:
            log("rollout/step", step, **{"perf/save_model_time": 1.0})
        if step % 10 == 0:
            log(
                "eval/step",
                step,
                **{
                    "eval/two_digit": reward,
                    "eval/gsm8k": reward / 3,
                    "eval/gsm8k-pass@2": 1.0,
                    "eval/step": step,
                },
            )
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def write_lines(directory, *lines: dict):
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def test_load_run_reads_each_metric_over_its_own_steps(tmp_path):
    lines = [
        {
            "step_key": "train/step",
            "step": 1,
            "time": 2.0,
            "train/loss": None,
            "nonfinite": {"train/loss": "nan"},
        },
        {"step_key": "train/step", "step": 0, "time": 1.0, "train/loss": 0.5},
        {"step_key": "rollout/step", "step": 0, "time": 1.0, "rollout/raw_reward": 0.25},
    ]
    run = load_run(write_lines(tmp_path / "run", *lines))
    assert run.name == "run"
    assert run.series.keys() == {"train/loss", "rollout/raw_reward"}
    loss = run.series["train/loss"]
    assert loss.steps.tolist() == [0, 1] and loss.unit == "optimizer step"
    assert loss.values[0] == 0.5 and math.isnan(loss.values[1])


def test_load_run_of_a_live_run_leaves_out_the_torn_line(tmp_path):
    run_dir = write_lines(tmp_path / "run", {"step_key": "train/step", "step": 0, "train/loss": 0.5})
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('{"step_key": "tr')
    assert load_run(run_dir).series["train/loss"].steps.tolist() == [0]


def test_running_mean_by_hand():
    values = np.array([1.0, 2.0, 6.0, np.nan, 4.0])
    assert running_mean(values, 3).tolist() == [1.5, 3.0, 4.0, 5.0, 4.0]
    assert [smoothing_window(n) for n in (1, 30, 60, 100)] == [3, 3, 7, 11]


def test_step_times_by_hand(tmp_path):
    def line(number: int, **seconds: float) -> dict:
        return {"step_key": "rollout/step", "step": number} | {
            f"perf/{k}_time": v for k, v in seconds.items()
        }

    rows = (
        line(0, train_wait=2.0, rollout=1.9, pack=0.25, handover=0.25, forward=0.5, train=1.5, step=4.0),
        line(1, train_wait=2.0, ref_model_update=1.0, step=3.0),
        {
            "step_key": "rollout/step",
            "step": 1,
            "perf/save_model_time": 9.0,
        },  # it comes after the step, in a separate line
    )
    times = step_times(load_run(write_lines(tmp_path / "apart", *rows)))
    assert {part: seconds.tolist() for part, seconds in times.parts.items()} == {
        # It includes the rollout, or runs at the same time: no separate part.
        "waiting for the rollout": [2.0, 2.0],
        "data": [0.5, 0.0],
        "forward": [0.5, 0.0],  # train contains it
        "optimizer": [0.0, 1.0],
        UNMEASURED: [1.0, 0.0],  # 4 - 3
    }
    assert times.whole.tolist() == [4.0, 3.0]
    rows = (line(0, train_wait=1.0, backward=1.98, step=3.0),)
    assert UNMEASURED not in step_times(load_run(write_lines(tmp_path / "within 2 %", *rows))).parts
    times = step_times(load_run(write_lines(tmp_path / "no total", line(0, train_wait=2.0))))
    assert times.whole is None
    rows = ({"step_key": "train/step", "step": 0, "train/loss": 1.0},)
    assert step_times(load_run(write_lines(tmp_path / "untimed", *rows))) is None


def test_all_pictures_of_one_run(tmp_path, capsys):
    run_dir = write_run(tmp_path / "run", steps=60)
    assert plot.main([str(run_dir)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == [str(run_dir / "plots" / f"{name}.png") for name in PICTURES]
    for name in PICTURES:
        pixels = imread(run_dir / "plots" / f"{name}.png")
        assert pixels.shape[0] > 500 and pixels[..., :3].std() > 0.05  # the picture is not empty


def test_missing_metrics_are_named_and_not_drawn(tmp_path, capsys):
    drop = ("train/kl_loss", "train/ppo_kl", LOGPROB_DIFF_MAX, "perf/")
    run_dir = write_run(tmp_path / "run", steps=5, drop=drop)
    assert plot.main([str(run_dir), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "note: run did not record train/kl_loss or train/ppo_kl\n" in printed
    assert f"note: run did not record {LOGPROB_DIFF_MAX}\n" in printed
    written = {path.stem for path in (tmp_path / "out").iterdir()}
    assert written == set(PICTURES) - {"kl", "step_time"}
    assert not (run_dir / "plots").exists()


def test_values_that_are_not_finite_are_noted(tmp_path):
    rows = [
        {"step_key": "train/step", "step": i, "train/loss": value} for i, value in enumerate((1.0, None, 2.0))
    ]
    _, notes = plot.plot_runs([load_run(write_lines(tmp_path / "run", *rows))], tmp_path / "out")
    assert "run: train/loss was not finite at 1 steps (gaps)" in notes


@pytest.mark.slow
def test_several_runs_are_overlaid(tmp_path, capsys):
    runs = [write_run(tmp_path / name, steps=40, seed=i) for i, name in enumerate(("sync", "async"))]
    with pytest.raises(ValueError, match="--out must be given for several runs, got 2 run directories"):
        plot.main([str(run) for run in runs])
    assert plot.main([*map(str, runs), "--out", str(tmp_path / "out")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(PICTURES)


def test_axes_hold_the_recorded_numbers(tmp_path):
    from matplotlib.figure import Figure

    run = load_run(write_run(tmp_path / "run", steps=10))
    panels = {panel.file: panel for panel in plot.PANELS}
    axes = Figure().subplots()
    panels["reward.png"].draw(axes, [run])
    raw, smooth, gsm8k, two_digit = axes.lines
    assert raw.get_ydata().tolist() == run.series["rollout/raw_reward"].values.tolist()
    assert smooth.get_ydata().tolist() == running_mean(raw.get_ydata(), 3).tolist()
    assert gsm8k.get_ydata().tolist() == [0.35 / 3] and two_digit.get_ydata().tolist() == [0.35]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["training (bold: mean over 3)", "gsm8k (evaluation)", "two_digit (evaluation)"]
    axes = Figure().subplots()
    panels["step_time.png"].draw(axes, [run])
    tops = [bar.get_y() + bar.get_height() for bar in axes.containers[-1]]
    assert np.allclose(tops, run.series["perf/step_time"].values)


@pytest.mark.parametrize("prefix", ["rollout/raw_reward/", "rollout/reward/"])
def test_rewards_of_parts_have_lines_of_their_own(tmp_path, prefix):
    from matplotlib.figure import Figure

    parts = {f"{prefix}solver": 0.75, f"{prefix}critic": 0.25}
    rows = [
        {"step_key": "rollout/step", "step": i, "rollout/raw_reward": 0.5, "eval/gsm8k": 0.1, **parts}
        for i in range(3)
    ]
    axes = Figure().subplots()
    plot.draw_reward(axes, [load_run(write_lines(tmp_path / "run", *rows))])
    drawn = {line.get_linestyle(): line.get_ydata().tolist() for line in axes.lines[-2:]}
    assert sorted(drawn.values()) == [[0.25] * 3, [0.75] * 3]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["training (bold: mean over 3)", "gsm8k (evaluation)", "critic", "solver"]


def test_zero_difference_stays_on_the_log_axis(tmp_path):
    from matplotlib.figure import Figure

    panel = next(panel for panel in plot.PANELS if panel.file == "logprob_diff.png")
    for values, scale in (((1e-7, 0.0, 3e-6), "symlog"), ((1e-7, 3e-6), "log"), ((0.0, 0.0), "linear")):
        rows = [{"step_key": "train/step", "step": i, LOGPROB_DIFF: value} for i, value in enumerate(values)]
        axes = Figure().subplots()
        panel.draw(axes, [load_run(write_lines(tmp_path / scale, *rows))])
        assert axes.get_yscale() == scale


def test_bad_directories_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"RUN_DIR must hold metrics\.jsonl, got .*nowhere without it"):
        plot.main([str(tmp_path / "nowhere")])
    empty = write_lines(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"RUN_DIR must hold metrics, got an empty .*metrics\.jsonl"):
        plot.main([str(empty)])
    other = write_lines(tmp_path / "other", {"step_key": "rollout/step", "step": 0, "rollout/rewards": 1.0})
    with pytest.raises(ValueError, match="RUN_DIR must hold a metric that has a picture, got none"):
        plot.main([str(other)])
    (empty / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(
        ValueError, match=r"RUN_DIR must hold metrics, got 1 damaged lines in .*metrics\.jsonl"
    ):
        plot.main([str(empty)])
