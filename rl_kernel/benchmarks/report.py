"""Results as tables for a terminal. Everything printed stands in the JSON too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

LINEAR_COLUMNS = (
    "row", "ms", "min..max", "x floor", "extra MiB", "log-prob", "entropy", "d_hidden", "d_weight", "target", ""
)  # fmt: skip
STREAM_COLUMNS = ("row", "ms", "min..max", "GB/s", "of copy", "extra MiB", "error", "target", "")


def machine_text(machine: dict[str, Any]) -> str:
    """Two lines: where, and what ran."""
    facts = machine["gpu_facts"]
    where = machine["gpu"] or f"CPU {machine['cpu']}"
    versions = [f"{name} {machine[name]}" for name in ("torch", "cuda", "triton") if machine[name]]
    extra = [f"{name} {value}" for name, value in facts.items()]
    dirty = {True: " + uncommitted changes", False: "", None: ""}[machine["dirty"]]
    return "\n".join(
        [
            "  ".join([where, *versions, *extra]),
            f"{machine['date']}  commit {machine['commit'] or 'unknown'}{dirty}  {machine['command']}",
        ]
    )


def linear_text(result: dict[str, Any]) -> str:
    """The table of one case. "x floor": against three matrix products, for a forward alone against one."""
    case, product = result["case"], result["product_ms"]
    head = (
        f"{case['name']}: N {case['tokens']}, H {case['hidden']}, V {case['vocab']};"
        f" one product {product['median']:.3f} ms ({product['min']:.3f}..{product['max']:.3f}),"
        f" {result['product_tflops']:.0f} TFLOP/s; floor of forward+backward {result['floor_ms']:.2f} ms"
        f" [checks {result['seconds']['checks']} s, timing {result['seconds']['timing']} s]"
    )
    lines = [head, *table(LINEAR_COLUMNS, [_linear_cells(row) for row in result["rows"]])]
    return "\n".join(lines + _notes(result["rows"]) + [_comparison(found) for found in result["comparisons"]])


def stream_text(result: dict[str, Any]) -> str:
    """The table of the operators that move bytes."""
    head = f"bytes moved; copy bandwidth {result['copy_gbs']} GB/s (read plus written)"
    lines = [head, *table(STREAM_COLUMNS, [_stream_cells(row) for row in result["rows"]])]
    return "\n".join(lines + _notes(result["rows"]))


def _linear_cells(row: dict[str, Any]) -> list[str]:
    if "ms" not in row:
        return [row["name"], "-", row["skipped"]]
    errors = row["errors"]
    worst = [_error(errors, name) for name in ("log_prob", "entropy", "d_hidden")]
    weights = [name for name in ("d_weight", "d_weight_other") if name in errors]
    over_all = [errors[name] for name in weights]
    unknown = None in over_all
    worst.append("-" if not weights else "nan" if unknown else f"{max(over_all):.0e}")
    return [row["name"], *_times(row), f"{row['ratio']:.3f}", _extra(row), *worst, *_target(row)]


def _stream_cells(row: dict[str, Any]) -> list[str]:
    if "ms" not in row:
        return [row["name"], "-", row["skipped"]]
    return [
        row["name"],
        *_times(row),
        f"{row['gbs']:.0f}",
        f"{row['share']:.2f}",
        _extra(row),
        _error(row, "error"),
        *_target(row),
    ]


def _times(row: dict[str, Any]) -> list[str]:
    ms = row["ms"]
    return [f"{ms['median']:.3f}", f"{ms['min']:.3f}..{ms['max']:.3f}"]


def _extra(row: dict[str, Any]) -> str:
    return f"{row['extra_mib']:.0f}" if "extra_mib" in row else "-"


def _error(errors: dict[str, Any], name: str) -> str:
    if name not in errors:
        return "-"
    value = errors[name]
    return "nan" if value is None else f"{value:.0e}"


def _target(row: dict[str, Any]) -> list[str]:
    target = row.get("target")
    if target is None:
        return ["-", ""]
    parts = [f"{target['limit']:.2f}"]
    if target.get("base"):
        parts.append(f"x row without ({target['value']:.3f})" if "value" in target else "x row without")
    if target.get("mib"):
        parts.append(f"in {target['mib']:g} MiB")
    return [" ".join(parts), {True: "MET", False: "MISSED", None: "not measured"}[row.get("met")]]


def _notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    found: dict[str, list[str]] = {}
    for row in rows:
        for reason in row.get("fallbacks", []):
            found.setdefault(f"ran the reference ({reason})", []).append(row["name"])
        if "retained_mib" in row:
            found.setdefault(f"keeps {row['retained_mib']} MiB after the first call", []).append(row["name"])
    return [f"  {what}: {', '.join(names)}" for what, names in found.items()]


def _comparison(found: dict[str, Any]) -> str:
    if found["ours"] is None:
        return f"  against {found['rival']}: {found['note']}"
    met = "MET" if found["met"] else "MISSED"
    return (
        f"  against {found['rival']}: {found['ours']} is {found['speedup']:.2f}x as fast,"
        f" target {found['target']:g}: {met}"
    )


def judged(results: dict[str, Any]) -> Iterator[tuple[str, str, bool | None, str]]:
    """(case, row, met, measured against the limit) of every target; None and "" where it was not measured."""
    for result in results["linear"]:
        case = result["case"]["name"]
        yield from ((case, row["name"], *_held(row)) for row in result["rows"] if "target" in row)
        for found in result["comparisons"]:
            if found["ours"] is not None:
                text = f"{found['speedup']:.2f} x as fast, at least {found['target']:g}"
                yield case, f"{found['ours']} beside {found['rival']}", found["met"], text
    streams = (results["elementwise"] or {"rows": []})["rows"]
    yield from (("bytes", row["name"], *_held(row)) for row in streams if "target" in row)


def _held(row: dict[str, Any]) -> tuple[bool | None, str]:
    """Whether a row meets its target, and its figure beside it."""
    if row.get("met") is None:
        return None, ""
    target = row["target"]
    if "share" in row:
        return row["met"], f"{row['share']:.2f} of a copy, at least {target['limit']:g}"
    of, memory = target["base"] or "products", f" in {target['mib']:g} MiB" if target["mib"] else ""
    return row["met"], f"{target['value']:.3f} x {of}, at most {target['limit']:g}{memory}"


def summary_text(results: dict[str, Any]) -> str:
    """How many targets are met, and each one that is not."""
    every = list(judged(results))
    if not every:
        return "no targets here: they are for a GPU"
    missed = [f"  MISSED {case} {name} {text}" for case, name, met, text in every if met is False]
    counts = [sum(met is state for _, _, met, _ in every) for state in (True, False, None)]
    return "\n".join(["targets: {} met, {} missed, {} not measured".format(*counts), *missed])


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned lines. A row that is too short ends with a remark, which may run over the columns after it."""
    full = [row for row in rows if len(row) == len(columns)]
    widths = [max(len(row[i]) for row in [columns, *full]) for i in range(len(columns))]
    widths[0] = max([widths[0], *(len(row[0]) for row in rows)])

    def line(cells: Sequence[str]) -> str:
        first, *others = cells
        aligned = [first.ljust(widths[0])]
        aligned += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=False)]
        return "  ".join(aligned).rstrip()

    return [
        line(columns),
        *(
            line(row) if len(row) == len(columns) else "  ".join([row[0].ljust(widths[0]), *row[1:]])
            for row in rows
        ),
    ]


def trace_text(name: str, wall_ms: float, kernels: Sequence[tuple[str, float, int]], most: int = 12) -> str:
    """The kernels of one call that take the most time; `idle` is the wall time in which none of them ran."""
    total = sum(ms for _, ms, _ in kernels)
    head = f"{name}: {wall_ms:.3f} ms, kernels {total:.3f} ms, idle {max(wall_ms - total, 0.0):.3f} ms"
    rows = [
        [kernel[:90], f"{ms:.3f}", f"{ms / wall_ms:.1%}", str(calls)]
        for kernel, ms, calls in sorted(kernels, key=lambda found: -found[1])[:most]
    ]
    return "\n".join([head, *table(("kernel", "ms", "share", "calls"), rows)])
