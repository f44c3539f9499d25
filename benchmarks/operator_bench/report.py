"""Renders operator records as Markdown, for the terminal and for `vime bench report`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from operator_bench.pairs import Pair, Row, all_rows, linear_pairs, loss_pairs, ran_kernel, stream_pairs

LINEAR_COLUMNS = (
    "row",
    "ms",
    "min..max",
    "x floor",
    "extra MiB",
    "log-prob",
    "entropy",
    "d_hidden",
    "d_weight",
)
STREAM_COLUMNS = ("row", "ms", "min..max", "GB/s", "of copy", "extra MiB", "error")
PAIR_COLUMNS = ("rl_kernel", "compared with", "ratio", "95 % interval", "extra MiB of both", "verdict")
NO_GPU = "No GPU: these times show that the benchmark works, and nothing of a GPU."
HOW_TO_READ = (
    "**x floor** is a row's time divided by that of three bare matrix products, of a forward alone by that of one. "
    "**Ratio** is the time of rl_kernel divided by the other's, the median over the rounds: below 1 rl_kernel is "
    "faster. Its interval is that of the sign test and holds for this process. A difference is shown if the interval "
    "does not contain 1; of 20 equal pairs one is called different by chance. A record without single calls has **no "
    "interval**: a verdict then needs 6 calls of each, and all calls of one faster than all calls of the other. "
    "**Extra MiB** is the peak of a call beyond inputs and gradients. Errors are against float64."
)


def result_lines(results: Row) -> Iterator[str]:
    """Yields the lines of a file: machine, every case, and the rows that ran no kernel."""
    yield from machine_lines(results["machine"])
    yield from ("", HOW_TO_READ)
    for result in results["linear"]:
        yield from ("", *linear_lines(result))
    if results["elementwise"]:
        yield from ("", *stream_lines(results["elementwise"]))
    yield from ("", *fallback_lines(results))


def machine_lines(machine: Row) -> Iterator[str]:
    """Yields the lines about machine, versions and command."""
    facts = {"driver": machine["gpu_facts"].get("driver_version", "unknown"), **machine["gpu_facts"]}
    told = [f"{name} {value}" for name, value in facts.items() if name != "driver_version"]
    names = ("python", "torch", "cuda", "triton", "liger-kernel", "cut-cross-entropy")
    versions = [f"{name} {machine[name]}" for name in names if machine.get(name)]
    dirty = " and changes that are in no commit" if machine["dirty"] else ""
    yield f"- **Hardware** {', '.join([machine['gpu'], *told]) if machine['gpu'] else 'CPU ' + machine['cpu']}"
    yield f"- **Versions** {', '.join(versions)}"
    yield f"- **Commit** {machine['commit'] or 'unknown'}{dirty}, {machine['date']}"
    yield from ("", "```bash", machine["command"], "```")
    if machine["gpu"] is None:
        yield from ("", NO_GPU)


def linear_lines(result: Row) -> Iterator[str]:
    """Yields the lines of a case of the linear operators: every row, then every comparison."""
    case, product = result["case"], result["product_ms"]
    yield f"#### {case['name']}: {case['tokens']:,} tokens, hidden {case['hidden']:,}, vocabulary {case['vocab']:,}"
    yield ""
    yield (
        f"One product {product['median']:.3f} ms ({product['min']:.3f}..{product['max']:.3f}), "
        f"{result['product_tflops']:.0f} TFLOP/s; floor of forward and backward {result['floor_ms']:.2f} ms"
    )
    yield from ("", *table(LINEAR_COLUMNS, [_linear_cells(row) for row in result["rows"]]))
    yield from _compared(*linear_pairs(result["rows"]))
    yield from _compared(loss_pairs(result["rows"]), [])
    for row in (row for row in result["rows"] if "retained_mib" in row):
        yield f"- {row['name']}: keeps {row['retained_mib']} MiB after the first call"


def stream_lines(result: Row) -> Iterator[str]:
    """Yields the lines of the operators that move bytes: every row, then every comparison."""
    yield "#### Operators that move bytes"
    yield ""
    yield f"A device copy reads and writes {result['copy_gbs']} GB/s"
    yield from ("", *table(STREAM_COLUMNS, [_stream_cells(row) for row in result["rows"]]))
    yield from _compared(*stream_pairs(result["rows"]))


def fallback_lines(results: Row) -> Iterator[str]:
    """Yields the rows of rl_kernel that ran no kernel, by reason."""
    reasons: dict[str, list[str]] = {}
    for row in all_rows(results):
        if row["operator"] != "rival" and "ms" in row and not ran_kernel(row):
            for reason in row.get("fallbacks") or ["by design on host tensors"]:
                reasons.setdefault(reason, []).append(row["name"])
    if not reasons:
        yield "Every row of rl_kernel ran its kernels."
    for reason, names in reasons.items():
        yield f"- ran the PyTorch reference ({reason}): {', '.join(dict.fromkeys(names))}"


def _linear_cells(row: Row) -> list[str]:
    if "ms" not in row:
        return [row["name"], *["-"] * (len(LINEAR_COLUMNS) - 1)]
    errors = row["errors"]
    worst = [_error(errors, name) for name in ("log_prob", "entropy", "d_hidden")]
    weights = [errors[name] for name in ("d_weight", "d_weight_other") if name in errors]
    worst.append("-" if not weights else "nan" if None in weights else f"{max(weights):.0e}")
    return [row["name"], *_times(row), f"{row['ratio']:.3f}", _extra(row), *worst]


def _stream_cells(row: Row) -> list[str]:
    if "ms" not in row:
        return [row["name"], *["-"] * (len(STREAM_COLUMNS) - 1)]
    return [
        row["name"],
        *_times(row),
        f"{row['gbs']:.0f}",
        f"{row['share']:.2f}",
        _extra(row),
        _error(row, "error"),
    ]


def _compared(pairs: Sequence[Pair], unmatched: Sequence[tuple[str, str]]) -> Iterator[str]:
    if pairs:
        yield from ("", *table(PAIR_COLUMNS, [_pair_cells(pair) for pair in pairs]))
    if unmatched:
        yield ""
    yield from (f"- {name}: not compared, as {why}" for name, why in unmatched)


def _pair_cells(pair: Pair) -> list[str]:
    ratio, rival = pair.ratio, pair.rival
    interval = "none" if ratio.low is None else f"{ratio.low:.3f} to {ratio.high:.3f}"
    words = f"**{pair.words}**" if pair.words in ("faster", "slower") else pair.words
    name = rival["name"].removeprefix(f"{rival.get('against')}: ")
    extra = f"{_extra(pair.ours)}, {_extra(rival)}"
    return [pair.ours["name"], name, f"{ratio.value:.3f}", interval, extra, words]


def _times(row: Row) -> list[str]:
    ms = row["ms"]
    return [f"{ms['median']:.3f}", f"{ms['min']:.3f}..{ms['max']:.3f}"]


def _extra(row: Row) -> str:
    return f"{row['extra_mib']:,.0f}" if "extra_mib" in row else "-"


def _error(errors: Row, name: str) -> str:
    if name not in errors:
        return "-"
    return "nan" if errors[name] is None else f"{errors[name]:.0e}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a Markdown table, aligned for a terminal: the first column to the left, all others to the right."""
    widths = [max(3, *(len(row[i]) for row in [columns, *rows])) for i in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join([cells[0].ljust(widths[0]), *rest])} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return [line(columns), line(rule), *map(line, rows)]


def trace_text(name: str, wall_ms: float, kernels: Sequence[tuple[str, float, int]]) -> str:
    """Returns the 12 kernels with the most time in a call. `idle` is the wall time without a running kernel."""
    total = sum(ms for _, ms, _ in kernels)
    head = f"{name}: {wall_ms:.3f} ms, kernels {total:.3f} ms, idle {max(wall_ms - total, 0.0):.3f} ms"
    rows = [
        [kernel[:90], f"{ms:.3f}", f"{ms / wall_ms:.1%}", str(calls)]
        for kernel, ms, calls in sorted(kernels, key=lambda found: -found[1])[:12]
    ]
    return "\n".join([head, *table(("kernel", "ms", "share", "calls"), rows)])
