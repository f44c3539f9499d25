"""`vime plot RUN_DIR [RUN_DIR ...] [--out DIR]`: draws metrics.jsonl as one PNG per picture and overview.png.

If a run did not record a metric, a note names the metric, and no curve is drawn. Runs share each picture, in colours.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from slime.tracking.metrics import LOGPROB_DIFF, LOGPROB_DIFF_MAX
from vime.doctor.finding import one_line
from vime.view.run_metrics import (
    TIME_METRICS,
    TIME_PARTS,
    UNMEASURED,
    RunMetrics,
    StepTimes,
    load_run,
    running_mean,
    smoothing_window,
    step_times,
)

# Okabe & Ito's palette. Readers with any kind of colour vision can distinguish the colours.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
PART_COLOURS = dict(
    zip(
        (*TIME_PARTS, UNMEASURED),
        (
            "#0072B2",  # waiting for the rollout
            "#B8AD1F",  # taking turns
            "#8C8C8C",  # data
            "#CC79A7",  # reference log-probs
            "#E69F00",  # old log-probs
            "#44AA99",  # values
            "#D55E00",  # forward
            "#F0E442",  # policy loss
            "#882255",  # backward
            "#6E4B2A",  # pipeline stages
            "#332288",  # optimizer
            "#009E73",  # weights
            "#56B4E9",  # metrics, audit, trace
            "#D9D9D9",  # not measured
        ),
        strict=True,
    )
)
LINES: tuple[Any, ...] = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P")
PARTS = ("rollout/raw_reward/", "rollout/reward/")
"""Prefixes of the names of data sets, of a plug-in's roles, and of the parts of a reward."""
MAX_BARS = 60
LONG = 150  # a line with at least this many points is smoothed
KL_LINES = (
    ("train/kl_loss", "to the reference, in the loss"),
    ("train/ppo_kl", "to the sampling policy"),
)


@dataclass(frozen=True)
class Panel:
    """One picture. A note names each missing metric of `expected`. One metric of `alternatives` is enough."""

    file: str
    title: str
    draw: Callable[[Axes, Sequence[RunMetrics]], None]
    expected: tuple[str, ...] = ()
    alternatives: tuple[str, ...] = ()

    def metrics(self, run: RunMetrics) -> tuple[str, ...]:
        """Returns the metrics of the panel that `run` recorded."""
        return tuple(name for name in (*self.expected, *self.alternatives) if name in run.series)

    def missing(self, run: RunMetrics) -> list[str]:
        missing = [name for name in self.expected if name not in run.series]
        if self.alternatives and not any(name in run.series for name in self.alternatives):
            missing.append(" or ".join(self.alternatives))
        return missing


def _colour(runs: Sequence[RunMetrics], run: int, line: int) -> str:
    """Returns a line's colour: by metric for one run; by run, with one legend per figure, for several runs."""
    return COLOURS[(line if len(runs) == 1 else run) % len(COLOURS)]


def _under(runs: Sequence[RunMetrics], run: int) -> float:
    """Returns the points by which a run's line is wider than the last run's, so that equal curves are all visible."""
    return min(1.4, 4.2 / max(1, len(runs) - 1)) * (len(runs) - 1 - run)


def _proxy(runs: Sequence[RunMetrics], colour: str) -> str:
    """Returns the colour of a legend entry for every run's lines."""
    return colour if len(runs) == 1 else "black"


def legend(axes: Axes, handles: Sequence[Artist], columns: int) -> None:
    """Draws the legend above the axes next to the title, so that it hides no data."""
    axes.legend(
        handles=handles,
        frameon=False,
        fontsize=8,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        borderaxespad=0.1,
        ncols=columns,
        handlelength=1.6,
        columnspacing=1.2,
    )


def draw_lines(axes: Axes, runs: Sequence[RunMetrics], lines: Sequence[tuple[str, str]], ylabel: str) -> None:
    """Draws each recorded (metric, label). A long line is drawn faintly under its running mean."""
    marks: dict[int, Artist] = {}
    for r, run in enumerate(runs):
        for i, (metric, label) in enumerate(lines):
            if metric not in run.series:
                continue
            series = run.series[metric]
            colour, style = _colour(runs, r, i), LINES[0 if len(runs) == 1 else i]
            xlabel, values = series.unit, series.values
            if len(values) > LONG:
                window = smoothing_window(len(values))
                axes.plot(series.steps, values, color=colour, alpha=0.25, linewidth=0.6)
                xlabel, values = f"{series.unit} (bold: mean over {window})", running_mean(values, window)
            marker = "o" if len(values) == 1 else None
            width = 1.5 + _under(runs, r)
            axes.plot(series.steps, values, color=colour, linestyle=style, marker=marker, linewidth=width)
            axes.set_xlabel(xlabel)
            marks[i] = Line2D([], [], color=_proxy(runs, colour), linestyle=style, linewidth=1.5, label=label)
    axes.set_ylabel(ylabel)
    if len(lines) > 1:
        legend(axes, [marks[i] for i in sorted(marks)], columns=3)


def draw_reward(axes: Axes, runs: Sequence[RunMetrics]) -> None:
    handles: dict[str, Artist] = {}
    names = sorted({name for run in runs for name in run.eval_names()})
    parts = {name for run in runs for name in run.series if name.startswith(PARTS)}
    names += sorted(parts)
    for r, run in enumerate(runs):
        if "rollout/raw_reward" in run.series:
            steps, values = run.series["rollout/raw_reward"].steps, run.series["rollout/raw_reward"].values
            window = smoothing_window(len(steps))
            colour, marker = _colour(runs, r, 0), "o" if len(steps) == 1 else None
            axes.plot(steps, values, color=colour, alpha=0.35, linewidth=1)
            width = 2.2 + _under(runs, r)
            axes.plot(steps, running_mean(values, window), color=colour, linewidth=width, marker=marker)
            label = f"training (bold: mean over {window})" if len(runs) == 1 else "training"
            handles[""] = Line2D([], [], color=_proxy(runs, colour), linewidth=2.2, label=label)
        for i, name in enumerate(names):
            if name not in run.series:
                continue
            look: dict[str, Any] = {
                "marker": MARKERS[i % len(MARKERS)],
                "markeredgecolor": "white",
                "linestyle": "--",
            }
            look |= {"markersize": 7, "linewidth": 1}
            if name in parts:
                look = {"linestyle": LINES[1 + i % 3], "linewidth": 1.5}
            colour = _colour(runs, r, i + 1)
            axes.plot(run.series[name].steps, run.series[name].values, color=colour, **look)
            label = f"{name.removeprefix('eval/')} (evaluation)"
            if name in parts:
                label = name.removeprefix(PARTS[0]).removeprefix(PARTS[1])
            handles[name] = Line2D([], [], color=_proxy(runs, colour), label=label, **look)
    axes.set_xlabel("rollout")
    axes.set_ylabel("mean reward")
    legend(axes, [handles[key] for key in sorted(handles)], columns=3)


def draw_logprob_diff(axes: Axes, runs: Sequence[RunMetrics]) -> None:
    lines = ((LOGPROB_DIFF, "mean over tokens"), (LOGPROB_DIFF_MAX, "largest"))
    draw_lines(axes, runs, lines, "|log-prob difference| (nats)")
    found = [run.series[name].values for run in runs for name, _ in lines if name in run.series]
    decades(axes, np.concatenate(found))


def decades(axes: Axes, values: np.ndarray) -> None:
    """Sets a logarithmic y-axis of whole decades around `values`, which are not negative. NaNs are ignored."""
    positive = values[(values > 0) & np.isfinite(values)]
    if not len(positive):
        return
    bottom, top = 10.0 ** np.floor(np.log10(positive.min())), 10.0 ** np.ceil(np.log10(positive.max()))
    if (values == 0).any():  # some steps agree bitwise, so the axis is linear from 0 to the first decade
        axes.set_yscale("symlog", linthresh=bottom)
        axes.set_ylim(0, max(top, 10 * bottom))
    else:
        axes.set_yscale("log")
        axes.set_ylim(bottom, max(top, 10 * bottom))


def _draw_kl(axes: Axes, runs: Sequence[RunMetrics]) -> None:
    draw_lines(axes, runs, KL_LINES, "KL (nats per token)")


def _draw_length(axes: Axes, runs: Sequence[RunMetrics]) -> None:
    lines = (("rollout/response_len/mean", "mean"), ("rollout/response_len/max", "longest"))
    draw_lines(axes, runs, lines, "response (tokens)")
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])


def _draw_loss(axes: Axes, runs: Sequence[RunMetrics]) -> None:
    axes.axhline(0, color="#8C8C8C", linewidth=0.6)
    draw_lines(axes, runs, (("train/loss", "loss"),), "loss")


def _draw_grad_norm(axes: Axes, runs: Sequence[RunMetrics]) -> None:
    draw_lines(axes, runs, (("train/grad_norm", "gradient norm"),), "gradient norm")


def _draw_times(axes: Axes, runs: Sequence[RunMetrics]) -> None:
    """Draws stacked bars over the steps for one run. For several runs, draws each run's mean seconds per step."""
    timed = [(run.name, times) for run in runs if (times := step_times(run)) is not None]
    if len(runs) == 1:
        _draw_time_bars(axes, timed[0][1])
    else:
        _draw_mean_times(axes, timed)
    handles, _ = axes.get_legend_handles_labels()
    if len(runs) == 1:  # the same order as the stacked bars
        handles.reverse()
    axes.legend(handles=handles, frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_mean_times(axes: Axes, timed: Sequence[tuple[str, StepTimes]]) -> None:
    rows, left = np.arange(len(timed)), np.zeros(len(timed))
    for part, colour in PART_COLOURS.items():
        if any(part in times.parts for _, times in timed):
            means = np.array([times.parts[part].mean() if part in times.parts else 0 for _, times in timed])
            axes.barh(rows, means, 0.5, left, color=colour, label=part)
            left += means
    for row, (name, _) in enumerate(timed):
        axes.annotate(name, (0, row - 0.27), (3, 0), textcoords="offset points", va="bottom", fontsize=8)
    axes.margins(x=0.02)
    axes.set_yticks([])
    axes.set_ylim(len(timed) - 0.6, -0.6)
    axes.set_xlabel("mean of a rollout step (seconds)")


def _draw_time_bars(axes: Axes, times: StepTimes) -> None:
    per_bar = -(-len(times.steps) // MAX_BARS)
    groups = [slice(i, i + per_bar) for i in range(0, len(times.steps), per_bar)]
    centres = np.array([times.steps[g].mean() for g in groups])
    width = 0.85 * (np.diff(centres).min() if len(centres) > 1 else 1.0)
    bottom = np.zeros(len(groups))
    for part, colour in PART_COLOURS.items():
        if part in times.parts:
            heights = np.array([times.parts[part][g].mean() for g in groups])
            axes.bar(centres, heights, width, bottom, color=colour, label=part)
            bottom += heights
    axes.margins(x=0.02)
    axes.set_xlabel("rollout" if per_bar == 1 else f"rollout (a bar: mean of {per_bar})")
    axes.set_ylabel("time of a step (seconds)")


PANELS = (
    Panel("reward.png", "Reward", draw_reward, expected=("rollout/raw_reward",)),
    Panel("step_time.png", "Time of a step", _draw_times, alternatives=TIME_METRICS),
    Panel(
        "logprob_diff.png",
        "Trainer against engine",
        draw_logprob_diff,
        expected=(LOGPROB_DIFF, LOGPROB_DIFF_MAX),
    ),
    Panel("kl.png", "KL divergence", _draw_kl, alternatives=tuple(metric for metric, _ in KL_LINES)),
    Panel(
        "response_length.png",
        "Response length",
        _draw_length,
        expected=("rollout/response_len/mean", "rollout/response_len/max"),
    ),
    Panel("loss.png", "Loss", _draw_loss, expected=("train/loss",)),
    Panel("grad_norm.png", "Gradient norm", _draw_grad_norm, expected=("train/grad_norm",)),
)


def dress(axes: Axes, title: str) -> None:
    """Sets title and grid of a picture. With horizontal bars (an inverted y-axis), the grid lines are vertical."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="x" if axes.yaxis_inverted() else "y", color="#E6E6E6", linewidth=0.7)


def _draw_panel(axes: Axes, panel: Panel, runs: Sequence[RunMetrics]) -> None:
    panel.draw(axes, runs)
    dress(axes, panel.title)
    if not axes.yaxis_inverted():
        low, high = axes.get_xlim()
        if high - low < 1:  # a single step
            axes.set_xlim((low + high) / 2 - 1, (low + high) / 2 + 1)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))


def name_runs(figure: Figure, runs: Sequence[RunMetrics]) -> None:
    if len(runs) == 1:
        figure.suptitle(runs[0].name, fontsize=10, color="#555555")
        return
    handles = [
        Line2D([], [], color=_colour(runs, r, 0), linewidth=4, label=run.name) for r, run in enumerate(runs)
    ]
    figure.legend(handles=handles, loc="outside upper center", frameon=False, ncols=3, fontsize=9)


def save(figure: Figure, path: Path) -> Path:
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=140)
    return path


def plot_runs(runs: Sequence[RunMetrics], out: Path) -> tuple[list[Path], list[str]]:
    """Writes one PNG per panel and overview.png to `out`. Returns (written paths, notes about missing metrics)."""
    notes = [
        f"{run.name} did not record {name}" for panel in PANELS for run in runs for name in panel.missing(run)
    ]
    notes += [f"{run.name}: {run.damaged} damaged lines are left out" for run in runs if run.damaged]
    for run in runs:
        for name in dict.fromkeys(name for panel in PANELS for name in panel.metrics(run)):
            broken = int(np.isnan(run.series[name].values).sum())
            if broken:
                notes.append(f"{run.name}: {name} was not finite at {broken} steps (gaps)")
    panels = [panel for panel in PANELS if any(panel.metrics(run) for run in runs)]
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for panel in panels:
        figure = Figure(figsize=(7.5, 4.2), layout="constrained")
        _draw_panel(figure.subplots(), panel, runs)
        # Bars of several runs have their names on the axis.
        if panel.draw is not _draw_times or len(runs) == 1:
            name_runs(figure, runs)
        written.append(save(figure, out / panel.file))
    if panels:
        written.append(save(_overview(panels, runs, notes), out / "overview.png"))
    return written, notes


def _overview(panels: Sequence[Panel], runs: Sequence[RunMetrics], notes: Sequence[str]) -> Figure:
    """Draws all panels on one page: reward and times over the full width, the others in pairs, notes below."""
    wide = [panel for panel in panels if panel.draw in (draw_reward, _draw_times)]
    pairs = [panel for panel in panels if panel not in wide]
    heights = [len(wide), -(-len(pairs) // 2)]
    figure = Figure(
        figsize=(13, 3.5 * sum(heights) + 0.5), layout=ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.12)
    )
    # Separate figures, because the legend next to the times would make every picture of the page narrower.
    nonempty = [rows for rows in heights if rows]
    subfigures: Any = figure.subfigures(len(nonempty), 1, height_ratios=nonempty)  # a figure or an array
    parts = iter(np.atleast_1d(subfigures))
    for group, columns in ((wide, 1), (pairs, 2)):
        if group:
            grid = (part := next(parts)).add_gridspec(-(-len(group) // columns), columns)
            for i, panel in enumerate(group):
                _draw_panel(part.add_subplot(grid[i // columns, i % columns]), panel, runs)
    name_runs(figure, runs)
    if notes:
        figure.supxlabel("\n".join(notes), fontsize=8, color="#555555")
    return figure


def main(argv: Sequence[str]) -> int:
    """Runs `vime plot`. Raises ValueError for a directory without metrics."""
    parser = argparse.ArgumentParser(
        prog="vime plot", description="Draw the metrics of one or several runs as PNGs."
    )
    parser.add_argument(
        "run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="directory with metrics.jsonl"
    )
    parser.add_argument(
        "--out", type=Path, help="where to write; default RUN_DIR/plots, required for several runs"
    )
    args = parser.parse_args(argv)
    if args.out is None and len(args.run_dirs) > 1:
        raise ValueError(
            f"--out must be given for several runs, got {len(args.run_dirs)} run directories; name one"
        )
    runs = [load_run(run_dir) for run_dir in args.run_dirs]
    if len({run.name for run in runs}) < len(runs):
        runs = [replace(run, name=str(path)) for run, path in zip(runs, args.run_dirs, strict=True)]
    written, notes = plot_runs(runs, args.out or args.run_dirs[0] / "plots")
    for note in notes:
        print(f"note: {one_line(note)}")
    if not written:
        raise ValueError("RUN_DIR must hold a metric that has a picture, got none; the notes name them")
    for path in written:
        print(path)
    return 0
