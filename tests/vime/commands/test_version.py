"""`vime --version` prints the version, the commit of checkout or wheel, and one line per package."""

from __future__ import annotations

import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from vime.cli import main
from vime.commands.version import commit
from vime.doctor.machine import run_command


def test_versions_of_this_environment(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["vime"] == version("vime")
    assert (lines["torch"], lines["ray"]) == (version("torch"), version("ray"))
    assert {"commit", "python", "megatron-core", "vllm-router", "transformers"} <= set(lines)


def test_commit_of_a_checkout(tmp_path: Path):
    package = tmp_path / "vime"
    package.mkdir()
    code = package / "code.py"
    code.write_text("A = 1\n")

    def git(*words: str) -> str:
        name = ("-c", "user.name=test", "-c", "user.email=test@example.invalid")
        return subprocess.run(
            ["git", *name, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "Begin")
    head = git("rev-parse", "HEAD").strip()
    assert commit(package) == head
    code.write_text("A = 2\n")
    run_command.cache_clear()
    assert commit(package) == f"{head} (with local changes)"


def test_commit_of_a_wheel(tmp_path: Path):
    assert commit(tmp_path) == "unknown"
    (tmp_path / "COMMIT").write_text("0123abc\n")
    assert commit(tmp_path) == "0123abc"
