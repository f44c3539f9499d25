"""Turns pairs of log-probs into a table, a JSON record and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from slime.algo.consistency import order_statistics, token_sums

_MARKS = (("mean", "o", "#0072B2"), ("p99", "s", "#E69F00"), ("max", "D", "#D55E00"))


@dataclass(frozen=True)
class LogProbDifference:
    """Compares `first` and `second` over the same tokens: |difference| in nats, and the number of bitwise equal
    values."""

    part: str
    first: str
    second: str
    tokens: int
    mean: float
    p99: float
    max: float
    bitwise_equal: int


def compare(part: str, first: tuple[str, Tensor], second: tuple[str, Tensor]) -> LogProbDifference:
    """Compares two named tensors [N] fp32 of the same N >= 1 tokens."""
    a, b = first[1], second[1]
    sums = token_sums(a, b, eps_clip=0.2, eps_clip_high=0.2)
    n = a.numel()
    p99, largest = order_statistics((a - b).abs(), [-(-99 * n // 100) - 1, n - 1])
    return LogProbDifference(
        part, first[0], second[0], n, sums.abs_dlogp / n, p99, largest, int(sums.bitwise_equal)
    )


def table(pairs: Sequence[LogProbDifference]) -> str:
    """Formats the pairs as a table, grouped by the part of the difference that they measure."""
    names = [f"  {pair.first} - {pair.second}" for pair in pairs]
    width = max(len(name) for name in names) + 2
    lines = [
        f"{'|difference| in nats':<{width}}{'tokens':>8}{'mean':>10}{'p99':>10}{'max':>10}   bitwise equal"
    ]
    part = None
    for name, pair in zip(names, pairs, strict=True):
        if pair.part != part:
            part = pair.part
            lines.append(part)
        share = f"{pair.bitwise_equal:,} ({pair.bitwise_equal / pair.tokens:.0%})"
        numbers = "".join(f"{value:>10.1e}" for value in (pair.mean, pair.p99, pair.max))
        lines.append(f"{name:<{width}}{pair.tokens:>8,}{numbers}   {share}")
    return "\n".join(lines)


def as_json(pairs: Sequence[LogProbDifference], **head: object) -> dict[str, object]:
    return {**head, "pairs": [asdict(pair) for pair in pairs]}


def draw(pairs: Sequence[LogProbDifference], title: str, path: Path) -> None:
    """Draws each pair's mean, p99 and maximum on a logarithmic axis. Values of exactly 0 are text at the left edge."""
    figure = Figure(figsize=(9.0, 1.2 + 0.42 * len(pairs)), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    values = [v for pair in pairs for v in (pair.mean, pair.p99, pair.max) if v > 0]
    low = min(values, default=1e-9) / 4
    rows = range(len(pairs), 0, -1)
    for row, pair in zip(rows, pairs, strict=True):
        axes.plot([max(pair.mean, low), max(pair.max, low)], [row, row], color="#C8C8C8", zorder=1)
        if pair.max == 0:
            axes.annotate("0: bitwise equal", (low, row), (8, 0), textcoords="offset points", va="center")
    for name, marker, colour in _MARKS:
        found = [(getattr(p, name), r) for r, p in zip(rows, pairs, strict=True) if getattr(p, name) > 0]
        if found:
            x, y = zip(*found, strict=True)
            axes.scatter(x, y, marker=marker, color=colour, label=name, zorder=2)
    axes.set_xscale("log")
    axes.set_xlim(left=low)
    axes.set_yticks(list(rows), [f"{pair.first} - {pair.second}" for pair in pairs], fontsize=8)
    axes.set_xlabel("|log-prob difference| (nats)")
    axes.set_title(title, fontsize=10)
    axes.grid(axis="x", color="#E6E6E6")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def active(values: Sequence[Tensor], masks: Sequence[Sequence[int] | None]) -> Tensor:
    """Concatenates the active tokens of the samples: [N] fp32."""
    parts = [x if mask is None else x[torch.tensor(mask) != 0] for x, mask in zip(values, masks, strict=True)]
    return torch.cat(parts).float()
