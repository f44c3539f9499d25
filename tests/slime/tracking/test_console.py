"""Tests the console output of a run: columns by loss and by width, the time left, samples, and the last lines."""

from __future__ import annotations

import io
import itertools
import re
from types import SimpleNamespace

import pytest

from slime.algo.losses import LOSSES, loss_for
from slime.config import Config
from slime.config.config_file import split_argv
from slime.operators import Decision
from slime.protocols import RolloutBatch, ShownSample, TrainResult
from slime.tracking.console import StepLine, choose_columns
from slime.tracking.console.columns import POLICY, duration, fitting
from slime.tracking.report import Reporter
from slime.tracking.samples import shown_sample
from slime.tracking.trackers import Trackers
from slime.types import Sample


@pytest.fixture(autouse=True)
def in_its_own_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def plain(stream: io.StringIO) -> list[str]:
    return re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()).splitlines()


SIZES = {
    **{
        "actor_num_gpus_per_node": 1,
        "rollout_num_gpus": 1,
        "rollout_batch_size": 1,
        "n_samples_per_prompt": 1,
    },
    **{"global_batch_size": 1, "num_steps_per_rollout": 1},
}


def config(**values) -> Config:
    return Config.from_flat({"num_rollout": 60, "run_dir": "runs/a b", **SIZES, **values})


KINDS = {
    "grpo": ({"advantage_estimator": "grpo"}, POLICY),
    "ppo": ({"advantage_estimator": "ppo"}, "v_loss expl_var"),
    "opd": ({"use_opd": True, "rm_type": "zero"}, "rev_kl"),
    "dpo": ({"loss_type": "dpo"}, "accuracy margin"),
    "sft": ({"loss_type": "sft_loss"}, "loss lr grad"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_columns_are_those_of_the_loss(kind):
    values, wanted = KINDS[kind]
    titles = [column.title for column in choose_columns(config(**values))]
    assert titles[-1] == "left" and len(set(titles)) == len(titles)
    if kind == "grpo":
        assert titles[:-1] == [column.title for column in wanted]
    else:
        assert set(wanted.split()) <= set(titles)
    assert ("reward" in titles) == (kind in ("grpo", "ppo"))
    assert ("accuracy" in titles) == (kind == "dpo") and ("roll_s" in titles) == (kind not in ("dpo", "sft"))


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_its_line_at_every_width(monkeypatch, name):
    columns = choose_columns(config(loss_type=name))
    metrics = {metric: 123456.789 for column in columns for metric in column.metrics}
    for width in (20, 40, 79, 80, 100, 132, 400):
        monkeypatch.setenv("COLUMNS", str(width))
        stream = Terminal()
        line = StepLine(total=60, stream=stream, columns=columns)
        line.show(7, metrics)
        header, first = plain(stream)
        assert max(len(header), len(first)) <= width
        assert first.split()[0] == "7/60" and len(header.split()) >= 2
        if width == 400:
            assert header.split()[1:] == [column.title for column in columns]
    assert loss_for(config(loss_type=name).algorithm).name == name


@pytest.mark.parametrize("kind", KINDS)
def test_80_characters_hold_what_the_loss_is_about_and_the_time_left(kind):
    values, wanted = KINDS[kind]
    titles = [column.title for column in fitting(choose_columns(config(**values)), 80 - 7)]
    must = ["reward", "length", "loss", "kl_old", "grad"] if kind == "grpo" else wanted.split()
    assert {*must, "left"} <= {*titles}


def test_another_width_prints_another_header_and_no_terminal_has_all_columns(monkeypatch):
    stream, metrics = Terminal(), {"rollout/raw_reward": 0.5}
    line = StepLine(stream=stream)
    for width in ("200", "60", "60"):
        monkeypatch.setenv("COLUMNS", width)
        line.show(0, metrics)
    shown = plain(stream)
    assert [i for i, text in enumerate(shown) if "reward" in text] == [0, 2]
    assert len(shown[2]) == len(shown[3]) == len(shown[4]) <= 60 < len(shown[0])
    monkeypatch.setenv("COLUMNS", "40")
    file = io.StringIO()
    StepLine(stream=file).show(0, metrics)
    assert file.getvalue().split("\n")[0].split()[1:] == [column.title for column in POLICY]


def test_an_evaluation_of_many_sets_wraps_between_values(monkeypatch):
    metrics = {f"eval/set-number-{i}": i / 7 for i in range(9)}
    monkeypatch.setenv("COLUMNS", "80")
    stream, file = Terminal(), io.StringIO()
    for one in (stream, file):
        StepLine(stream=one).show_eval(4, metrics)
    shown = plain(stream)
    assert len(shown) > 1 and max(map(len, shown)) <= 80
    assert " ".join(shown).split() == file.getvalue().split() and file.getvalue().count("\n") == 1


@pytest.mark.parametrize(
    "seconds, text",
    [
        *((0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (725, "12m05s"), (3599.7, "1h00m"), (12000, "3h20m")),
        *((86399.9, "1d00h"), (187200, "2d04h"), (8640000, "100d")),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text and len(text) <= 6


SHOWN = ShownSample("p" * 900 + "?", "first\nsecond \x1b[31mred" + "r" * 900, "7", "1.0", "completed")


def test_a_sample_is_short_and_has_no_control_characters(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    stream, file = Terminal(), io.StringIO()
    StepLine(stream=stream).show_sample(20, SHOWN)
    StepLine(stream=file).show_sample(20, SHOWN)
    shown = plain(stream)
    assert shown[0] == "sample of rollout 20:  reward 1.0, completed"
    assert max(map(len, shown)) <= 60 and len(shown) == 1 + 3 + 3 + 1
    assert shown[1].startswith("  prompt    ...ppp") and shown[3].endswith("p?")
    assert shown[4].startswith("  response  first second [31mred") and shown[6].endswith("r...")
    assert shown[7] == "  label     7"
    assert "\x1b" not in file.getvalue()


def test_the_sample_of_a_rollout():
    messages = [{"role": "user", "content": "hello"}, {"role": "user", "content": "x" * 5000 + "end"}]
    sample = Sample(prompt=messages, response="y" * 5000, label=7, reward={"score": 1})
    shown = shown_sample([[sample]])
    assert shown.prompt.endswith("xend") and len(shown.prompt) == len(shown.response) == 2000
    assert (shown.label, shown.reward) == ("7", "{'score': 1}")
    of_sft = [{"role": "user", "content": "34+48="}, {"role": "assistant", "content": "82"}]
    assert shown_sample([[Sample(prompt=of_sft, response="82")]]).prompt == "34+48="
    assert shown_sample([]) is None and shown_sample([[]]) is None
    assert shown_sample([[Sample(prompt=[])]]).prompt == ""


@pytest.mark.parametrize(
    "stream, wanted, samples",
    [(Terminal, None, 2), (Terminal, False, 0), (io.StringIO, None, 0), (io.StringIO, True, 2)],
)
def test_a_sample_every_20_rollouts_and_the_time_left(monkeypatch, stream, wanted, samples):
    clock = itertools.count(step=2)  # seconds
    monkeypatch.setattr("slime.tracking.report.time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    c = config(log_sample=wanted, run_dir=None)
    report = Reporter(
        c, Trackers([]), StepLine(total=60, stream=(screen := stream()), columns=choose_columns(c))
    )
    report.start(0)
    for rollout in range(21):
        with report.running(rollout):
            pass
        batch = RolloutBatch([], {"rollout/raw_reward": 0.5}, tokens=8, forward_flops=1.0, sample=SHOWN)
        report.step(rollout, batch, TrainResult(steps=[{"train/loss": 0.5}], rollout={}, perf={}))
    report.close()
    shown = plain(screen)
    assert sum("sample of rollout" in text for text in shown) == samples
    left = [text.split()[-1] for text in shown if "/60" in text]
    assert left == [duration(2 * (59 - rollout)) for rollout in range(21)] and left[0] == "1m58s"


def test_the_last_lines_name_the_best_evaluation_the_weights_and_the_next_command(tmp_path):
    save = tmp_path / "ckpt"
    (save / "iter_0000001").mkdir(parents=True)
    c = config(save=str(save), hf_checkpoint="Qwen", run_dir=str(tmp_path))
    report = Reporter(c, Trackers([]), StepLine(stream=(screen := io.StringIO())))
    report._evaluations = {
        0: {"a": 0.1, "b": float("nan"), "d": 0.0},
        2: {"a": 0.9, "d": 0.0},
        3: {"a": 0.9},  # an equal value that comes later
        4: {"a": 0.5, "c": 1.0, "d": 0.0},
    }
    report._saved = 3
    report.conclude()
    assert screen.getvalue().splitlines() == [
        f"best evaluation: a 0.9 after 2 rollouts (after 4: 0.5); its weights: {save}/iter_0000001",
        "best evaluation: d 0, equal in all 3 evaluations",
        "best evaluation: c 1 after 4 rollouts",
        f"weights: {save}/iter_0000003",
        f"next: vime export --load {save} --hf-checkpoint Qwen --output-dir {save}-hf",
    ]


@pytest.mark.parametrize(
    "values, saved, expected",
    [
        ({}, None, ["weights: not saved; --save DIR saves them", "next: vime ui 'runs/a b'"]),
        ({"save": "s"}, None, ["weights: this run saved none", "next: vime ui 'runs/a b'"]),
        ({"debug_rollout_only": True}, None, ["next: vime ui 'runs/a b'"]),
        (
            {"save": "s", "save_hf": "hf/{rollout_id}"},
            5,
            ["weights: s/iter_0000005 and hf/5", "next: vime ui 'runs/a b'"],
        ),
    ],
)
def test_the_last_lines_without_a_checkpoint_or_with_hugging_face_folders(values, saved, expected):
    report = Reporter(config(**values), Trackers([]), StepLine(stream=(screen := io.StringIO())))
    report._saved = saved
    report.conclude()
    assert screen.getvalue().splitlines() == expected


def test_v_is_verbose_and_only_then_a_decision_has_its_hash():
    assert [group.name for group in split_argv(["--lr", "1", "-v"])] == ["lr", "verbose"]
    assert rl_kernel_line(Decision("swiglu", "auto", "triton", "", "swiglu/0123abcd")) == (
        "swiglu/0123abcd              triton",
        "swiglu              triton",
    )


def rl_kernel_line(decision: Decision) -> tuple[str, str]:
    return str(decision), decision.short
