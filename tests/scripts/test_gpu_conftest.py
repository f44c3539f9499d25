"""Tests the hooks of tests/gpu/conftest.py in a pytest process that sees one GPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGIN = """
import torch

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
"""
GROUPS = """
import pytest
import torch.distributed as dist


def join(path):
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=0, world_size=1)


def test_leaves(tmp_path):
    join(tmp_path)


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    join(tmp_path_factory.mktemp("module"))
    raise RuntimeError("the engine did not start")


def test_breaks(broken):
    pass


def test_joins(tmp_path):
    join(tmp_path)
    dist.destroy_process_group()
"""


def said(folder: Path, *options: str) -> str:
    shutil.copy(ROOT / "tests" / "gpu" / "conftest.py", folder)
    (folder / "one_gpu.py").write_text(PLUGIN)
    (folder / "test_groups.py").write_text(GROUPS)
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "one_gpu", *options]
    command.append(str(folder))
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.parametrize("required", [(), ("--require-gpu",)], ids=["found", "required"])
def test_process_groups_that_are_left(tmp_path: Path, required: tuple[str, ...]) -> None:
    """A test that leaves a process group has an error, and later tests have none."""
    out = said(tmp_path, *required)
    assert "test_leaves left its process group" in out and "test_breaks left its process group" in out
    assert "2 passed" in out and "test_joins" not in out.partition("short test summary")[2]
