"""What stands beside the operators in rl_kernel.bench: their references, plain and compiled; and the calls it keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bench_runs import rows_of, run

from rl_kernel.benchmarks.targets import is_valid


def test_references_stand_beside_the_operators(tmp_path: Path) -> None:
    result = run(
        tmp_path, "linear_logp", "logp", "swiglu", "--cases", "tiny", "--rivals", "reference,compile"
    )
    rows = rows_of(result["linear"][0])
    assert rows["linear_logp reference"]["against"] == "linear_logp" and is_valid(
        rows["linear_logp reference"]
    )
    assert rows["linear_logp reference"]["implementation"] == {"linear_logp": "reference"}
    rows = rows_of(result["elementwise"])
    beside = {name: row["against"] for name, row in rows.items() if row["operator"] == "rival"}
    assert beside["logp forward: reference"] == "logp forward"
    assert beside["swiglu forward+backward: compile"] == "swiglu forward+backward"
    # an in-place backward leaves no logits for a second contender, and no operator but ours stands alone
    assert not any("in place" in name for name in beside) and "logp forward: compile" not in rows
    for name, row in rows.items():
        assert "target" not in row and row["error"] < 4 * 2**-8, name
        assert len(row["ms"]["each"]) == row["ms"]["calls"] == result["rounds"]
        assert min(row["ms"]["each"]) == pytest.approx(row["ms"]["min"], rel=1e-3)
    assert rows["swiglu forward"]["fallbacks"] and "fallbacks" not in rows["swiglu forward: reference"]


def test_compiled_rivals_compile_the_reference_alone(tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    run(tmp_path, "swiglu", "--rows", "forward: compile", "--rivals", "compile")
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_calls_stand_on_one_line(tmp_path: Path) -> None:
    run(tmp_path, "swiglu")
    lines = (tmp_path / "result.json").read_text().splitlines()
    assert all(line.count(",") >= 5 for line in lines if '"each": [' in line) and len(lines) < 90
