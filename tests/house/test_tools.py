"""The linter and the formatter find nothing, in the version of requirements/dev.txt."""

from __future__ import annotations

import subprocess
import sys

import pytest
from house_tree import ROOT


@pytest.mark.parametrize("arguments", [["check"], ["format", "--check"]], ids=["check", "format"])
def test_ruff(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *arguments, "--output-format", "concise", "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\nto fix: ruff {arguments[0]} ."
