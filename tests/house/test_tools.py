"""The linter, the formatter and the type checker find nothing, in the versions of requirements/dev.txt."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml
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


def test_mypy_as_a_commit_asks_for_it() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    (entry,) = (hook["entry"] for hook in hooks if hook["id"] == "mypy")
    command = [sys.executable, "-m", "mypy", *entry.split()[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\nto see it: {entry}"
