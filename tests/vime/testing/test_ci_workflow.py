"""Tests the workflow of examples/ci: its files exist, and its last command runs the example's tests."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "ci"


def read_steps() -> list[dict[str, Any]]:
    workflow = yaml.safe_load((EXAMPLE / "github.yml").read_text())
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML 1.1 reads the key `on` as True
    job = workflow["jobs"]["test"]
    assert job["runs-on"] == "ubuntu-latest" and job["timeout-minutes"] > 0
    return list(job["steps"])


def test_the_files_that_the_workflow_names_exist() -> None:
    steps = read_steps()
    text = "\n".join(str(step) for step in steps)
    paths = re.findall(r"\.vime/((?:scripts|requirements)/[\w./*-]+)", text)
    assert sorted(paths) == ["requirements/*.txt", "scripts/setup.sh"]
    assert all(list(ROOT.glob(path)) for path in paths)
    actions = [step["uses"] for step in steps if "uses" in step]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in actions)


def test_the_extra_of_the_page_has_pytest() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    file = project["tool"]["setuptools"]["dynamic"]["optional-dependencies"]["test"]["file"]
    assert file == ["requirements/test.txt"]
    assert re.search(r"^pytest>=", (ROOT / file[0]).read_text(), re.MULTILINE)
    assert "pip install vime[test]" in (ROOT / "docs" / "testing.md").read_text()
    assert project["project"]["entry-points"]["pytest11"] == {"vime.testing.plugin": "vime.testing.plugin"}


@pytest.mark.e2e
@pytest.mark.slow
def test_the_last_command_runs_the_tests_of_the_example(tmp_path: Path) -> None:
    """In a repository of its own, with the Python of this environment in place of the workflow's."""
    shutil.copytree(
        EXAMPLE, tmp_path / "tests", ignore=shutil.ignore_patterns("*.yml", "*.md", "__pycache__")
    )
    setup, tests = (shlex.split(step["run"], comments=True) for step in read_steps() if "run" in step)
    assert setup == ["bash", ".vime/scripts/setup.sh"] and tests[0] == ".vime/.venv/bin/python"
    done = subprocess.run(
        [sys.executable, *tests[1:], "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"^2 passed", done.stdout, re.MULTILINE), done.stdout
