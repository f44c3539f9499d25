"""Tests `vime bench report` on records with known results: its text, its pictures, and the sections that it
separates."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_cases import CONFIG, ENVIRONMENT, changed, full_steps
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.patches import Rectangle
from switch_bench import curves, pictures, report
from switch_bench.compare import pairs_of
from switch_bench.record import BASELINE, OPERATORS_FILE, RECORD_FILE, RL_KERNEL, Record
from switch_bench.verdicts import PASS_PARTS, compared

from vime.view.measures import PASS_TIME

ROOT = Path(__file__).parents[3]
PICTURES = (
    *("differences", "mean_step_time", "step_time", "time_breakdown", "peak_memory", "raw_reward"),
    "logprob_diff",
)


def text_of(record: Record) -> str:
    """Returns the part of a report about one record, without its pictures."""
    pairs, left_out = pairs_of(record)
    return "\n".join(report.record_lines(record, pairs, left_out, compared(record, pairs)))


def row(text: str, label: str) -> list[str]:
    """Returns the cells of the table row that begins with `label`, or an empty list without such a row."""
    lines = [line for line in text.splitlines() if line.startswith(f"| {label} |")]
    assert len(lines) <= 1
    return [cell.strip() for line in lines for cell in line.strip("|").split("|")]


def drop(record: Record, side: str, *names: str) -> Record:
    """Returns `record` without these metrics of `side`."""

    def without(step: dict[str, float]) -> dict[str, float]:
        return {name: value for name, value in step.items() if not name.startswith(names)}

    for i in range(len(record.sides[side])):
        record = changed(record, side, i, lambda r: replace(r, steps=[without(s) for s in r.steps]))
    return record


def test_the_command_writes_a_page_with_seven_pictures_per_record(tmp_path, capsys):
    """Operators, modules and full steps have a section each."""
    for name in ("e2e", "module", "op"):
        (tmp_path / name).mkdir()
    full_steps(repeats=1, steps=6).write(tmp_path / "e2e")
    full_steps(repeats=1, steps=6, tier="module", claim="the trainer alone").write(tmp_path / "module")
    shutil.copy(ROOT / "benchmarks/results/elementwise_h200.json", tmp_path / "op" / OPERATORS_FILE)
    out = tmp_path / "report"
    assert report.main([*(str(tmp_path / name) for name in ("e2e", "op", "module")), "--out", str(out)]) == 0
    text = (out / "report.md").read_text()
    title, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    assert [part.partition("\n")[0] for part in sections] == ["Operators", "Modules", "Full steps"]
    assert "|" not in title, "no table above the sections"
    operators, modules, steps = sections
    assert "| swiglu forward" in operators and "how much faster a training step is" in operators
    assert "### the trainer alone" in modules and "### the trainer alone" not in steps
    named = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert len(named) == 14 and {f"1-e2e-qwen3-4b-grpo-{picture}.png" for picture in PICTURES} < set(named)
    printed = capsys.readouterr().out.split()
    assert sorted(printed) == sorted(str(out / name) for name in ("report.md", *named))
    for name in named:
        image = imread(out / name)
        assert image.shape[1] > 900 and image[..., :3].std() > 0.02


def test_a_difference_of_3_percent_is_found_and_equal_things_are_not_called_different():
    text = text_of(full_steps(repeats=4, gain=0.03))
    step = row(text, "forward + loss + backward")
    assert step[-1] == "**faster**" and -4.5 < float(step[3].removesuffix(" %")) < -1.5
    memory = "-8.0 %", "none", "-8.0, -8.0, -8.0, -8.0 %", "**less memory, by as much in every repeat**"
    assert row(text, "trainer, peak memory")[3:] == [*memory]
    assert row(text, "optimizer, peak memory")[-1] == "equal"
    assert row(text, "raw_reward")[-1].startswith("no difference shown (within 0.0")
    assert "- **Counted** pairs: 4; steps of each run: 24 after 1 of warm-up" in text


def test_a_metric_of_one_side_is_named_and_not_compared():
    """A sum whose parts are incomplete on both sides is not a row."""
    record = drop(full_steps(repeats=3, steps=6), RL_KERNEL, "rollout/raw_reward")
    text = text_of(record)
    assert row(text, "raw_reward")[2:] == ["not recorded", *["none"] * 3, "rl_kernel did not record it"]
    assert re.search(r"^Recorded by neither side: .*KL to the reference", text, re.MULTILINE)
    record = drop(full_steps(repeats=1, steps=6), BASELINE, "perf/forward_time")
    text = text_of(drop(record, RL_KERNEL, "perf/policy_loss_time"))
    assert not row(text, "forward + loss + backward")
    assert row(text, "forward")[-1] == "baseline did not record it"
    assert row(text, "log-probs, ratio, KL and loss")[-1] == "rl_kernel did not record it"


def test_copies_of_one_run_are_one_sample():
    record = full_steps(repeats=1, steps=6)
    for side, (only,) in record.sides.items():
        step = {"rollout/raw_reward": 0.5 if side == BASELINE else 0.500001}
        steps = [{**s, **step} for s in only.steps]
        record.sides[side][:] = [
            replace(only, order=only.order + 2 * i, run=f"{side}-{i}", steps=steps) for i in range(4)
        ]
    assert row(text_of(record), "raw_reward")[-1] == "the same in every repeat: one sample, no verdict"


def test_memory_that_differs_alike_in_both_repeats_is_less():
    record = full_steps(repeats=2, steps=6)
    for step in (step for repeat in record.sides[RL_KERNEL] for step in repeat.steps):
        step["perf/trainer_peak_gib"], step["perf/optimizer_peak_gib"] = 60.0, 52.001
    text = text_of(record)
    *_, interval, _, words = row(text, "trainer, peak memory")
    assert (interval, words) == ("none", "**less memory, by as much in every repeat**")
    assert row(text, "optimizer, peak memory")[-1] == "same within 0.1 %"


def test_the_numbers_are_those_of_the_steps():
    """Times leave out the warm-up, numbers include it, and the peak is the highest over the steps."""
    record = full_steps(repeats=3)
    for repeat in record.sides[BASELINE]:
        repeat.steps[0] |= {"perf/step_time": 1e4, "train/grad_norm": 1e5}
    record.sides[BASELINE][0].steps[0]["perf/optimizer_peak_gib"] = 139.0
    text = text_of(record)
    assert float(row(text, "gradient norm")[1].split()[0].replace(",", "")) > 1000
    assert row(text, "optimizer, peak memory")[6] != "equal"
    step = row(text, "step")
    means, others = (
        [np.mean([s["perf/step_time"] for s in r.steps[1:]]) for r in record.sides[side]]
        for side in (BASELINE, RL_KERNEL)
    )
    assert step[1] == f"{np.exp(np.mean(np.log(means))):.4g} ± {np.std(means, ddof=1):.2g} s"
    shares = [b / a - 1 for a, b in zip(means, others, strict=True)]
    assert step[5] == ", ".join(f"{100 * x:+.{1 if abs(x) >= 0.01 else 2}f}" for x in shares) + " %"


def test_what_cannot_be_drawn_is_said():
    record = drop(full_steps(repeats=1, steps=6), BASELINE, "perf/")
    pairs = pairs_of(record)[0]
    assert (
        pictures.breakdown(record.warm_up, curves.sides_of(pairs))
        == "the parts of a step were not recorded by baseline"
    )
    nothing = "no time, speed or memory was recorded by both sides"
    assert pictures.differences([c for c in compared(record, pairs) if c.missing]) == nothing


def test_where_and_what_ran_is_said():
    record = full_steps(repeats=2, steps=6, notes=["4 of 36 layers"], preset="smoke")
    record = changed(record, BASELINE, 0, lambda r: replace(r, finished=False, steps=r.steps[:3]))
    record = changed(record, RL_KERNEL, 1, lambda r: replace(r, fallbacks={"logp": 1234}))
    text = text_of(record) + "\n".join(report.in_full(record, pairs_of(record)[0]))
    for told in (
        "- **Benchmark** qwen3-4b-grpo, preset smoke; `rlk_fast` is `off` in baseline, `auto` in rl_kernel",
        "- **Counted** pairs: 1; steps of each run: 5 after 1 of warm-up",
        "2 x NVIDIA H200, 143771 MiB, driver 580.1",
        "Python 3.11.9, torch 2.9.0, triton 3.5.0, vllm 0.12.0",
        "- **Commit** 0123456789abcdef",
        "- **Note** 4 of 36 layers",
        "- **Mind** Part of rl_kernel ran no kernel: logp (1,234 calls) fell back.",
        "- **Left out** baseline-0 did not finish (3 steps)",
        "vime bench e2e qwen3-4b.yaml --repeats 3",
        "train.lr: 1e-06",
        "packages.unrelated",
    ):
        assert told in text, told


@pytest.mark.parametrize(
    ("cluster", "gpus", "told"),
    [
        ({"device": "cpu"}, 2, "CPU, 64 of 64 cores of EPYC"),
        ({"actor_num_gpus_per_node": 1, "rollout_num_gpus": 1}, 8, "1 of 8 x NVIDIA H200, 143771 MiB"),
        ({"colocate": False, "rollout_num_gpus": 6}, 8, "8 x NVIDIA H200, 143771 MiB"),
        (
            {"actor_num_nodes": 4},
            2,
            "8 x NVIDIA H200, 143771 MiB, driver 580.1 (looked at on one host, which has 2)",
        ),
    ],
)
def test_hardware_is_what_the_runs_were_given(cluster: dict[str, Any], gpus: int, told: str):
    config = {**CONFIG, "cluster": CONFIG["cluster"] | cluster}
    environment = ENVIRONMENT | {"gpus": ENVIRONMENT["gpus"][:1] * gpus}
    assert report.used_hardware(environment, config).startswith(told)


def test_runs_that_differ_are_refused_before_anything_is_written(tmp_path):
    record = full_steps(repeats=1, steps=6)
    record.sides[RL_KERNEL][0].config["train"]["lr"] = 1.0
    for name, content in (("good", full_steps(repeats=1, steps=6)), ("bad", record)):
        (tmp_path / name).mkdir()
        content.write(tmp_path / name)
    arguments = [str(tmp_path / "good"), str(tmp_path / "bad"), "--out", str(tmp_path / "report")]
    with pytest.raises(ValueError, match=r"train\.lr: 1e-06 in baseline-0, 1\.0 in rl_kernel-0"):
        report.main(arguments)
    assert not (tmp_path / "report").exists()
    with pytest.raises(ValueError, match="--out must be given for several DIRs, got 2"):
        report.main(arguments[:2])
    with pytest.raises(ValueError, match=f"must hold {RECORD_FILE}, got none"):
        report.main([str(tmp_path)])
    with pytest.raises(ValueError, match=r"DIR must be a directory .*, got .*test_bench_report\.py"):
        report.main([__file__])
    (tmp_path / OPERATORS_FILE).write_text("{")
    with pytest.raises(ValueError, match="must be JSON"):
        report.main([str(tmp_path)])


def test_forward_loss_and_backward_are_compared_as_one():
    record = full_steps(repeats=3, steps=6)
    every = compared(record, pairs_of(record)[0])
    (found,) = (c for c in every if c.metric.name == PASS_TIME)
    parts = ("forward", "policy_loss", "backward")
    steps = [sum(s[f"perf/{p}_time"] for p in parts) for s in record.sides[BASELINE][0].steps[1:]]
    assert found.sides[BASELINE].repeats[0] == pytest.approx(np.mean(steps))
    assert [c.difference for c in every if c.metric.name in PASS_PARTS] == [None] * 3
    assert row(text_of(record), "backward")[-1] == "see forward + loss + backward"
    assert row(text_of(record), "loss, peak memory")[-1] == "see trainer, peak memory"


def test_pictures_show_the_numbers():
    """Bars begin at zero and have the length of a step's parts; a difference beyond the axis is a number with an
    arrow."""
    record = full_steps(repeats=3, steps=6)
    for step in (step for repeat in record.sides[RL_KERNEL] for step in repeat.steps):
        step["perf/optimizer_time"] *= 5
    pairs = pairs_of(record)[0]
    drawn = pictures.breakdown(record.warm_up, curves.sides_of(pairs))
    assert isinstance(drawn, Figure)
    (axes,) = drawn.axes
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert axes.get_xlim()[0] == 0 and min(bar.get_x() for bar in bars) == 0
    found = compared(record, pairs)
    (value,) = (c.difference.value for c in found if c.metric.name == "perf/optimizer_time")
    (axes,) = pictures.differences(found).axes
    (text,) = (text.get_text() for text in axes.texts)
    assert value > 3.5 and text == f"{100 * value:+.0f} % →" and axes.get_xlim()[1] < 50
    labels = [text.get_text() for text in axes.get_yticklabels()]
    marks = [line for line in axes.lines if line.get_marker() == "o"]
    coloured = {labels[int(m.get_ydata()[0])] for m in marks if m.get_color() != "#4D4D4D"}
    assert "trainer, peak memory (GiB)" in coloured and "step (s)" not in coloured


def test_bars_and_curves_show_the_numbers():
    """The picture has mean and 99th percentile of the counted steps, the highest peaks, each step and each
    evaluation."""
    record = full_steps(repeats=1, steps=120)
    for repeat, mode in ((record.sides[side][0], side) for side in (BASELINE, RL_KERNEL)):
        scores = {0: 0.05, 60: 0.1, 120: 0.2 if mode == BASELINE else 0.25}
        repeat.evaluations.update({str(at): {"gsm8k": score} for at, score in scores.items()})
        repeat.steps[0]["perf/step_time"] = 1e4
    pairs = pairs_of(record)[0]
    seconds = [s["perf/step_time"] for s in record.sides[BASELINE][0].steps[1:]]
    (axes,) = curves.mean_step_time(record.warm_up, curves.sides_of(pairs)).axes
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert [bar.get_x() for bar in bars] == [0, 0] and bars[0].get_width() == pytest.approx(np.mean(seconds))
    assert axes.lines[0].get_xdata()[1] == pytest.approx(np.percentile(seconds, 99))
    (axes,) = curves.peak_memory(record.warm_up, curves.sides_of(pairs)).axes
    assert max(patch.get_width() for patch in axes.patches) == 71
    (axes,) = curves.step_time(record.warm_up, curves.sides_of(pairs)).axes
    assert list(axes.lines[0].get_xdata()) == list(range(1, 120)) and max(axes.lines[0].get_ydata()) < 1e3
    (axes,) = curves.raw_reward(record.warm_up, curves.sides_of(pairs)).axes
    marked = [line for line in axes.lines if line.get_marker() == "o"]
    assert [list(line.get_xydata()[-1]) for line in marked] == [[120, 0.2], [120, 0.25]]

    text = text_of(record)
    assert "| 120 | 0.2000 (+0.1500) | 0.2500 (+0.2000) |" in text and "| 0 | 0.0500 | 0.0500 |" in text
    cells = row(text[text.index("Percentiles over 119 steps a side") :], "step")
    assert cells[3] == f"{np.percentile(seconds, 99):.4g} s"
    assert "Percentiles need 100 steps a side; there are 5." in text_of(full_steps(repeats=1, steps=6))
