"""Tests the records of benchmarks/results: each renders, is listed, has its command, and agrees with
docs/measured.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from operator_bench.pairs import all_rows, check
from operator_bench.report import result_lines
from switch_bench.compare import pairs_of, refuse_unlike
from switch_bench.record import read
from switch_bench.report import record_lines
from switch_bench.verdicts import STEP, TRAINER_PEAK, TRAINING, Comparison, compared

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
RUNS = sorted(path.parent for path in RESULTS.glob("*/bench.json"))
FILES = sorted(RESULTS.glob("*.json"))


def commands_of(content: Any) -> Iterator[str]:
    """Yields every command in a record or its parts."""
    if isinstance(content, dict):
        yield from [content["command"]] if "command" in content else content.get("commands", [])
    parts = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    for part in parts:
        yield from commands_of(part)


def test_every_record_is_listed_and_says_its_command() -> None:
    page = (ROOT / "docs/benchmarks.md").read_text()
    records = [*FILES, *(folder / "bench.json" for folder in RUNS)]
    assert len(FILES) >= 12 and len(RUNS) >= 8
    for record in records:
        name = record.parent.name if record.name == "bench.json" else record.stem
        assert f"](../{record.relative_to(ROOT)})" in page, record
        assert f"](../benchmarks/reports/{name}.md)" in page
        assert (ROOT / "benchmarks" / "reports" / f"{name}.md").is_file()
        found = list(commands_of(json.loads(record.read_text())))
        assert found and all(found), f"{record} must say the command that made it"


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: folder.name)
def test_every_record_of_runs_renders_and_the_page_of_figures_is_what_it_says(folder: Path) -> None:
    """docs/measured.md has a row per record of --rl-kernel-ops: both sides' means, and the share saved."""
    record = read(folder)
    pairs, left_out = pairs_of(record)
    refuse_unlike(record.name, record.switch, pairs)
    every = compared(record, pairs)
    text = "\n".join(record_lines(record, pairs, left_out, every))
    assert record.command in text and all(f"\n| {c.metric.label} | " in text for c in every)
    found = {c.metric.name: c for c in every}
    assert found[TRAINING].difference is not None
    if record.switch.field != "rl_kernel_ops":
        return
    shown = [TRAINING, TRAINER_PEAK, STEP] if record.tier == "e2e" else [TRAINING, TRAINER_PEAK]
    cells = [cell for name in shown for cell in less(found[name])]
    lines = (ROOT / "docs/measured.md").read_text().splitlines()
    (row,) = [line for line in lines if f"/{folder.name}.md)" in line and line.startswith("|")]
    assert [cell.strip() for cell in row.split("|")[2:-1] if cell.strip()] == cells


@pytest.mark.parametrize("name", ["operators_h200", "elementwise_h200"])
def test_every_record_of_operators_renders(name: str) -> None:
    content = json.loads((RESULTS / f"{name}.json").read_text())
    check(content, name)
    text = "\n".join(result_lines(content))
    assert content["machine"]["command"] in text and "NVIDIA H200" in text
    rows = list(all_rows(content))
    assert len(rows) >= 6 and all(f"| {row['name']} " in text for row in rows)
    for row in rows:
        assert ("ms" not in row) or f" {row['ms']['median']:.3f} |" in text, row["name"]


def test_a_record_without_single_calls_is_compared_by_its_ranges() -> None:
    content = json.loads((RESULTS / "operators_h200.json").read_text())
    lines = "\n".join(result_lines(content)).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    native = next(row for row in rows if row[:2] == ["linear_logp 1.5GiB bf16", "native"])
    assert native[2:] == ["0.533", "none", "122, 162", "**faster**"]
    why = "its results are off: d_weight_other 0.36, allowed 0.1"
    assert f"- cce (filters gradients): not compared, as {why}" in lines


def less(found: Comparison) -> list[str]:
    """Returns ["baseline, rl_kernel", "share less (95 % interval)"] as users write them; memory has no interval."""
    means = [f"{side.mean:#.3g}".rstrip(".") for side in found.sides.values() if side is not None]
    d = found.difference
    assert d is not None
    interval = "" if d.low is None or d.high is None else f" ({-100 * d.high:.1f} to {-100 * d.low:.1f})"
    return [", ".join(means), f"{-100 * d.value:.1f}%{interval if found.metric.unit == 's' else ''}"]
