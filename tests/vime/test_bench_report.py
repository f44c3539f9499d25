"""`vime bench report` on records with known truth: what it says, what it draws, what it keeps apart."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from bench_cases import changed, full_steps
from matplotlib.image import imread
from matplotlib.patches import Rectangle

from vime.bench import pictures, report
from vime.bench.compare import pairs_of
from vime.bench.record import BASELINE, RECORD_FILE, RL_KERNEL, SIDES, all_repeats
from vime.bench.verdicts import PASS_PARTS, PASS_TIME, compared

E2E_PICTURES = {
    "differences",
    "step_time",
    "step_time_steps",
    "time_breakdown",
    "peak_memory",
    "raw_reward",
    "logprob_diff",
}


def reported(tmp_path, *benchmarks) -> str:
    report.write_report(benchmarks, tmp_path / "report")
    return (tmp_path / "report" / report.REPORT_FILE).read_text()


def rows(text: str, label: str) -> list[list[str]]:
    """The cells of each table row that begins with `label`."""
    lines = [line for line in text.splitlines() if line.startswith(f"| {label} |")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def sections(text: str) -> dict[str, str]:
    title, *parts = re.split(r"^## ", text, flags=re.MULTILINE)
    return {"": title, **{part.partition("\n")[0]: part for part in parts}}


def drop(record, side: str, *names: str):
    """`record` whose `side` never reported these metrics."""
    for i in range(len(record.sides[side])):
        record = changed(record, side, i, lambda r: replace(r, steps=[_without(s, names) for s in r.steps]))
    return record


def _without(step, names):
    return {name: value for name, value in step.items() if not name.startswith(names)}


def test_the_command_writes_a_report_with_its_pictures(tmp_path, capsys):
    full_steps(repeats=1, steps=6).write(tmp_path)
    assert report.main([str(tmp_path)]) == 0
    text = (tmp_path / "report" / "report.md").read_text()
    printed = capsys.readouterr().out.split()
    named = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert {name.removeprefix("1-e2e-qwen3-4b-grpo-").removesuffix(".png") for name in named} == E2E_PICTURES
    assert printed == [str(tmp_path / "report" / name) for name in ("report.md", *named)]
    for name in named:
        image = imread(tmp_path / "report" / name)
        assert image.shape[1] > 900 and image[..., :3].std() > 0.02


def test_a_difference_of_3_percent_is_found_and_equal_things_are_not_called_different(tmp_path):
    text = reported(tmp_path, full_steps(repeats=4, gain=0.03))
    step = rows(text, "forward + loss + backward")[0]
    assert step[-1] == "**faster**" and -4.5 < float(step[3].removesuffix(" %")) < -1.5
    assert rows(text, "trainer, peak memory")[0][3:] == [
        "-8.0 %",
        "none",
        "-8.0, -8.0, -8.0, -8.0 %",
        "**less memory, by as much in every repeat**",
    ]
    assert rows(text, "optimizer, peak memory")[0][-1] == "equal"
    assert rows(text, "raw_reward")[0][-1].startswith("no difference shown (within 0.0")
    assert "- **Counted** 4 pairs of repeats, 24 steps each, after 1 of warm-up" in text


def test_a_sum_whose_parts_no_side_has_whole_is_no_row(tmp_path):
    record = drop(full_steps(repeats=1, steps=6), BASELINE, "perf/forward_time")
    text = reported(tmp_path, drop(record, RL_KERNEL, "perf/policy_loss_time"))
    assert not rows(text, "forward + loss + backward")
    assert "- forward: rl_kernel" in text and "- log-probs, ratio, KL and loss: baseline" in text


def test_the_preset_is_told_beside_the_benchmark_it_is_of(tmp_path):
    whole = full_steps(repeats=1, steps=6)
    assert f"**Benchmark** {whole.name};" in reported(tmp_path / "whole", whole)
    smoke = reported(tmp_path / "smoke", replace(whole, preset="smoke"))
    assert f"**Benchmark** {whole.name}, preset smoke;" in smoke


def test_only_training_is_laid_to_a_switch_of_operators(tmp_path):
    """Not the rollouts, hand-overs and weights that a step holds, and so not the step."""
    record = full_steps(repeats=4, gain=0.05)
    told = reported(tmp_path / "alike", record)
    assert rows(told, "step")[0][-1] == "**less, cause not shown**" and rows(told, "rollout")[0][
        -1
    ].startswith("no difference")
    assert rows(told, "forward + loss + backward")[0][-1] == "**faster**"
    for only in record.sides[RL_KERNEL]:
        for step in only.steps:
            step["perf/rollout_time"] *= 0.8
            step["perf/step_time"] -= 0.2 * step["perf/train_wait_time"]
            step["perf/train_wait_time"] *= 0.8
            step["perf/update_weights_time"] *= 0.5
    for repeat in (*record.sides[BASELINE], *record.sides[RL_KERNEL]):
        for step in repeat.steps:
            step["perf/actor_train_time"] = sum(step[name] for name in PASS_PARTS)
    told = reported(tmp_path / "unlike", record)
    passes = ("perf/log_probs_time", "perf/ref_log_probs_time", "perf/actor_train_time")
    means = {
        name: [np.mean([s[name] for r in record.sides[side] for s in r.steps[1:]]) for side in SIDES]
        for name in ("perf/step_time", "perf/train_wait_time", *passes)
    }
    decomposed = next(line for line in told.splitlines() if "By plain means: step" in line)
    shorter = [float(x) for x in re.findall(r" (\S+) s shorter", decomposed)]
    assert shorter == pytest.approx([a - b for a, b in means.values()], abs=0.006)
    assert "Operators run in old log-probs, reference log-probs and training:" in decomposed
    for label in ("step", "rollout", "weights to engines", "tokens by the step's time"):
        more = "more" if "tokens" in label else "less"
        assert rows(told, label)[0][-1] == f"**{more}, cause not shown**", label
    for label in ("training", "forward + loss + backward"):
        assert rows(told, label)[0][-1] == "**faster**", label
    assert re.search(r"- \*\*step\*\* .*: less, cause not shown\n", told)
    coloured = colours(record)
    assert coloured >= {"training (s)", "forward + loss + backward (s)"}
    assert coloured.isdisjoint({"step (s)", "rollout (s)", "weights to engines (s)"})
    assert rows(reported(tmp_path / "else", other_switch(record)), "rollout")[0][-1] == "**faster**"
    half = drop(record, RL_KERNEL, "perf/train_wait_time")
    assert "By plain means" not in reported(tmp_path / "half", half), (
        "what a side did not record has no difference"
    )


def colours(record) -> set[str]:
    """The metrics that the picture of differences calls better or worse."""
    pairs = pairs_of(record)[0]
    figure = pictures.figures(record, pairs, compared(record, pairs))["differences"][1]
    (axes,) = figure.axes
    labels = [text.get_text() for text in axes.get_yticklabels()]
    marks = [line for line in axes.lines if line.get_marker() == "o"]
    return {labels[int(m.get_ydata()[0])] for m in marks if m.get_color() != "#4D4D4D"}


def other_switch(record):
    """The same runs, as if they differed in the engine's memory."""
    sides = {}
    for side, repeats in record.sides.items():
        value = {"vllm_gpu_memory_utilization": 0.4 if side == BASELINE else 0.8}
        sides[side] = [replace(r, config={**r.config, "engine": value, "kernels": {}}) for r in repeats]
    switch = {"field": "vllm_gpu_memory_utilization", BASELINE: 0.4, RL_KERNEL: 0.8}
    return replace(record, sides=sides, switch=switch)


def test_copies_of_one_run_are_one_sample(tmp_path):
    record = full_steps(repeats=1, steps=6)
    for side, (only,) in record.sides.items():
        step = {"rollout/raw_reward": 0.5 if side == BASELINE else 0.500001}
        record.sides[side][:] = [
            replace(
                only, order=only.order + 2 * i, run=f"{side}-{i}", steps=[{**s, **step} for s in only.steps]
            )
            for i in range(4)
        ]
    assert (
        rows(reported(tmp_path, record), "raw_reward")[0][-1]
        == "the same in every repeat: one sample, no verdict"
    )


def test_memory_that_differs_alike_in_every_repeat_is_less(tmp_path):
    for repeats in (2, 3, 4):
        record = full_steps(repeats=repeats, steps=6)
        for repeat in record.sides[RL_KERNEL]:
            for step in repeat.steps:
                step["perf/trainer_peak_gib"], step["perf/optimizer_peak_gib"] = 60.0, 52.001
        text = reported(tmp_path, record)
        *_, interval, _, words = rows(text, "trainer, peak memory")[0]
        assert (interval, words) == ("none", "**less memory, by as much in every repeat**")
        alike = rows(text, "optimizer, peak memory")[0]
        assert alike[-1] == "same within 0.1 %"


def test_a_warm_up_is_one_of_times_and_not_of_numbers(tmp_path):
    record = full_steps(repeats=3, steps=6)
    for repeat in record.sides[BASELINE]:
        repeat.steps[0] |= {"perf/step_time": 1e4, "train/grad_norm": 1e4}
    text = reported(tmp_path, record)
    assert float(rows(text, "step")[0][1].split()[0]) < 100
    assert float(rows(text, "gradient norm")[0][1].split()[0].replace(",", "")) > 1000


def test_peak_memory_is_the_largest_of_all_steps(tmp_path):
    record = full_steps(repeats=1, steps=6)
    record.sides[BASELINE][0].steps[0]["perf/trainer_peak_gib"] = 139.0  # in the warm-up
    assert rows(reported(tmp_path, record), "trainer, peak memory")[0][1] == "139 GiB"


def test_the_numbers_are_those_of_the_steps(tmp_path):
    record = full_steps(repeats=3)
    step = rows(reported(tmp_path, record), "step")[0]
    means = [np.mean([s["perf/step_time"] for s in r.steps[1:]]) for r in record.sides[BASELINE]]
    assert step[1] == f"{np.mean(means):.4g} ± {np.std(means, ddof=1):.2g} s"
    others = [np.mean([s["perf/step_time"] for s in r.steps[1:]]) for r in record.sides[RL_KERNEL]]
    each = [
        f"{100 * (b / a - 1):+.{1 if abs(b / a - 1) >= 0.01 else 2}f}"
        for a, b in zip(means, others, strict=True)
    ]
    assert step[5] == ", ".join(each) + " %"


def test_modules_and_full_steps_stand_apart(tmp_path):
    """Operators have a section of their own too: test_bench_operators.py."""
    module = full_steps(repeats=1, steps=6, tier="module", claim="the trainer alone")
    parts = sections(reported(tmp_path, full_steps(repeats=1, steps=6), module))
    assert list(parts) == ["", "Modules", "Full steps"]
    assert "Nothing here says how much faster a whole step is" in parts["Modules"]
    assert "### the trainer alone" in parts["Modules"] and "### the trainer alone" not in parts["Full steps"]
    assert parts[""].count("|") == 0  # no table above the sections


def test_a_claim_of_experts_is_the_title_and_claims_no_more(tmp_path):
    record = full_steps(repeats=1, steps=6, claim="R3 against R3 + rl_kernel", experts=128)
    assert f"### R3 against R3 + rl_kernel\n\n{report.MOE_LIMIT}" in reported(tmp_path, record)
    assert report.MOE_LIMIT not in reported(tmp_path, replace(record, experts=0))


def test_a_module_is_about_training_and_not_about_its_step(tmp_path):
    """Which holds the reading of a file and a transfer to nobody."""
    record = full_steps(repeats=3, steps=6, gain=0.2, tier="module")
    for repeat in all_repeats(record):
        for step in repeat.steps:
            step["perf/actor_train_time"] = step["perf/backward_time"] + step["perf/forward_time"]
    text = reported(tmp_path, record)
    assert "- **training** " in text and "- **step" not in text
    assert rows(text, "step on saved rollouts") and not rows(text, "step")
    percentiles = text.partition("#### Percentiles")[2].partition("####")[0]
    assert "| training |" in percentiles and "| step |" not in percentiles
    assert "![Mean time of training]" in text and "![Mean time of a step]" not in text
    assert "![Mean time of a step]" in reported(tmp_path, replace(record, tier="e2e"))


def test_nothing_is_faster_where_no_kernel_ran(tmp_path):
    record = full_steps(repeats=3, steps=6, gain=0.2)
    assert "**faster**" in reported(tmp_path, record)
    for step in (step for repeat in record.sides[RL_KERNEL] for step in repeat.steps):
        step["rl_kernel/fast"] = 0.0
    text = reported(tmp_path, record)
    assert (
        "**faster**" not in text
        and "**less, cause not shown**" in text
        and "No kernel ran in rl_kernel" in text
    )


def test_a_metric_of_one_side_is_named_and_neither_compared_nor_drawn(tmp_path):
    record = drop(full_steps(repeats=3, steps=6), RL_KERNEL, "rollout/raw_reward", "perf/step_time")
    text = reported(tmp_path, record)
    assert not rows(text, "raw_reward") and not rows(text, "step")
    assert re.search(
        r"^- raw_reward: baseline [\d.]+ ± [\d.]+; rl_kernel did not record it$", text, re.MULTILINE
    )
    assert "- raw_reward: not drawn, as rollout/raw_reward was not recorded by rl_kernel" in text
    drawn = {path.name.removeprefix("1-e2e-qwen3-4b-grpo-") for path in (tmp_path / "report").glob("*.png")}
    assert drawn == {f"{name}.png" for name in E2E_PICTURES - {"raw_reward", "step_time", "step_time_steps"}}
    assert re.search(r"^Recorded by neither side: .*KL to the reference", text, re.MULTILINE)


def test_parts_that_one_side_never_timed_are_no_bar(tmp_path):
    record = drop(full_steps(repeats=1, steps=6), BASELINE, "perf/")
    text = reported(tmp_path, record)
    assert (
        "Where the time of a step goes: not drawn, as the parts of a step were not recorded by baseline"
        in text
    )
    assert "Peak memory by phase: not drawn, as no peak of a phase was recorded by both sides" in text


def test_percentiles_say_from_how_many_steps(tmp_path):
    few, many = full_steps(repeats=1, steps=9), full_steps(repeats=2, steps=61)
    short = rows(reported(tmp_path, few), "step")[1]
    assert short[1:3] == [BASELINE, "8"] and short[3].endswith(" s")
    assert short[4:] == ["too few steps", "too few steps"]
    found = rows(reported(tmp_path, many), "step")[1]
    times = [s["perf/step_time"] for r in many.sides[BASELINE] for s in r.steps[1:]]
    assert found[2:] == ["120", *(f"{np.percentile(times, p):.4g} s" for p in (50, 90, 99))]


def test_what_was_left_out_and_what_fell_back_is_said(tmp_path):
    record = changed(
        full_steps(repeats=2, steps=6), BASELINE, 0, lambda r: replace(r, finished=False, steps=r.steps[:3])
    )
    record = changed(record, RL_KERNEL, 1, lambda r: replace(r, fallbacks={"logp": 1234}))
    text = reported(tmp_path, record)
    assert "- **Left out** baseline-0 did not finish (3 steps)" in text and "- **Counted** 1 pair of" in text
    assert (
        "| logp | 0 | 1,234 |" in text
        and "- **Mind** Part of rl_kernel ran no kernel: logp fell back" in text
    )
    assert "ran anything else" in reported(tmp_path, full_steps(repeats=1, steps=6))


def test_where_and_what_ran_is_said_in_full(tmp_path):
    text = reported(tmp_path, full_steps(repeats=1, steps=6, notes=["4 of 36 layers"]))
    for told in (
        "2 x NVIDIA H200, 143771 MiB, driver 580.1",
        "Python 3.11.9, torch 2.9.0, triton 3.5.0, vllm 0.12.0",
        "- **Commit** 0123456789abcdef",
        "- **Note** 4 of 36 layers",
        "vime bench e2e qwen3-4b.yaml --repeats 3",
        "train.lr: 1e-06",
        "packages.unrelated",
    ):
        assert told in text, told


def test_runs_that_differ_are_refused_before_anything_is_written(tmp_path):
    record = full_steps(repeats=1, steps=6)
    record.sides[RL_KERNEL][0].config["train"]["lr"] = 1.0
    (tmp_path / "good").mkdir()
    (tmp_path / "bad").mkdir()
    full_steps(repeats=1, steps=6).write(tmp_path / "good")
    record.write(tmp_path / "bad")
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


def test_bars_begin_at_zero_and_steps_without_a_value_are_gaps(tmp_path):
    record = full_steps(repeats=2, steps=6)
    record = changed(record, RL_KERNEL, 0, lambda r: replace(r, steps=[*r.steps[:3], {}, *r.steps[4:]]))
    record = changed(record, RL_KERNEL, 1, lambda r: replace(r, steps=[*r.steps[:3], {}, *r.steps[4:]]))
    pairs, _ = pairs_of(record)
    both = {c.metric.name: c for c in compared(record, pairs)}
    for figure in (
        pictures._bars([both["perf/step_time"]]),
        pictures._peaks(both),
        pictures._breakdown(record, pairs),
    ):
        (axes,) = figure.axes
        bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
        assert axes.get_xlim()[0] == 0 and min(bar.get_x() for bar in bars) == 0 and len(bars) >= 2
    (axes,) = pictures._steps(record, pairs, "perf/step_time", "s").axes
    bold = {line.get_color(): line.get_ydata() for line in axes.lines if line.get_linewidth() > 1}
    gaps = {side: np.flatnonzero(np.isnan(bold[colour])) for side, colour in pictures.SIDE_COLOURS.items()}
    assert gaps[RL_KERNEL].tolist() == [0, 3] and gaps[BASELINE].tolist() == [
        0
    ]  # 0: the warm-up, off the axis
    assert axes.get_ylim()[0] > 5


def test_forward_loss_and_backward_are_compared_as_one(tmp_path):
    record = full_steps(repeats=3, steps=6)
    every = compared(record, pairs_of(record)[0])
    (found,) = (c for c in every if c.metric.name == PASS_TIME)
    parts = ("forward", "policy_loss", "backward")
    steps = [sum(s[f"perf/{p}_time"] for p in parts) for s in record.sides[BASELINE][0].steps[1:]]
    assert found.sides[BASELINE].repeats[0] == pytest.approx(np.mean(steps))
    assert [c.difference for c in every if c.metric.name in PASS_PARTS] == [None] * 3
    assert rows(reported(tmp_path, record), "backward")[0][-1] == "see forward + loss + backward"
    assert rows(reported(tmp_path, record), "loss, peak memory")[0][-1] == "see trainer, peak memory"


def test_small_parts_are_named_and_not_listed(tmp_path):
    text = reported(tmp_path, full_steps(repeats=1, steps=6))
    assert "Under 1 % of a step on both sides, not listed: sleep time, handover time." in text
    assert not rows(text, "sleep time") and rows(text, "optimizer")


def test_a_difference_beyond_the_axis_is_a_number_with_an_arrow():
    record = full_steps(repeats=3, steps=6)
    for repeat in record.sides[RL_KERNEL]:
        for step in repeat.steps:
            step["perf/optimizer_time"] *= 5
    found = compared(record, pairs_of(record)[0])
    (value,) = (c.difference.value for c in found if c.metric.name == "perf/optimizer_time")
    (axes,) = pictures._differences(found).axes
    (text,) = (text.get_text() for text in axes.texts)
    assert value > 3.5 and text == f"{100 * value:+.0f} % →" and axes.get_xlim()[1] < 50
