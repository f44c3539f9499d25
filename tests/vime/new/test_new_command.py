"""`vime new` writes files whose own test passes, and whose types an editor understands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vime.cli import main
from vime.new.command import KINDS, TEMPLATES

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {kind: tmp_path_factory.mktemp("new") / kind for kind in KINDS}
    for kind, folder in made.items():
        assert main(["new", kind, str(folder)]) == 0
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_the_test_of_each_kind_passes(folders: dict[str, Path], kind: str) -> None:
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folders[kind])]
    done = subprocess.run(command, cwd=folders[kind].parent, env=environ, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
    assert {path.name for path in folders[kind].iterdir()} >= {
        path.name.removesuffix(".txt") for path in (TEMPLATES / kind).iterdir()
    }


@pytest.mark.slow
def test_the_types_are_right(folders: dict[str, Path]) -> None:
    """mypy accepts the files, and finds a reward of a wrong type."""
    wrong = folders["reward"] / "wrong.py"
    wrong.write_text((folders["reward"] / "reward.py").read_text().replace("-> float", "-> str"))
    files = [
        folders["reward"] / "reward.py",
        folders["agent"] / "agent.py",
        folders["project"] / "train.py",
        wrong,
    ]
    command = [sys.executable, "-m", "mypy", "--strict", "--allow-untyped-defs", *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert found and all("wrong.py" in line for line in found), done.stdout
    assert any('variable has type "Reward"' in line for line in found)


@pytest.mark.slow
def test_the_types_of_the_agent_are_right(folders: dict[str, Path]) -> None:
    """mypy reads the whole package openai."""
    command = [sys.executable, "-m", "mypy", "--strict", str(folders["agent"] / "agent.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_no_file_is_replaced(tmp_path: Path, capsys: Any) -> None:
    for words, message in (
        (["new", "rewards", str(tmp_path / "a")], "KIND must be one of reward, agent, project, got rewards"),
        (["new", "reward"], "vime new reward must be followed by one folder, got none; give DIR"),
        (["new", "reward", str(tmp_path)], "DIR must be a new or an empty folder, got "),
    ):
        (tmp_path / "mine").touch()
        assert main(words) == 2
        assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert main(["new", "--help"]) == 0
