"""Runs `vime bench op` on tiny shapes of the CPU and returns the results for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from operator_bench import command as bench


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "result.json"
    assert bench.main([*arguments, "--device", "cpu", "--out", str(out)]) == 0
    return json.loads(
        out.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not standard JSON")
    )


def rows_of(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in result["rows"]}
