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
from vime.doctor import gpus

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
gpus.delta_net_obstacle = lambda machine: "no kernels for them"
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
MARKED = """
import pytest


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["plain", pytest.param("delta", marks=pytest.mark.delta_net)])
def test_family(name):
    assert name == "plain"
"""


def said(folder: Path, text: str, *options: str) -> str:
    shutil.copy(ROOT / "tests" / "gpu" / "conftest.py", folder)
    (folder / "one_gpu.py").write_text(PLUGIN)
    (folder / "test_it.py").write_text(text)
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    gpu: one GPU\n    delta_net: fla-core\npythonpath = .\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120).stdout


def test_a_process_group_that_is_left_is_an_error_of_its_own_test_only(tmp_path: Path) -> None:
    out = said(tmp_path, GROUPS)
    assert "test_leaves left its process group" in out and "test_breaks left its process group" in out
    assert "2 passed" in out and "test_joins" not in out.partition("short test summary")[2]


@pytest.mark.parametrize("required", [(), ("--require-gpu",)])
def test_what_the_packages_cannot_run_is_deselected_with_its_reason(
    tmp_path: Path, required: tuple[str, ...]
) -> None:
    out = said(tmp_path, MARKED, "-p", "one_gpu", *required)
    assert "1 passed, 1 deselected" in out
    assert "deselected here: 1 tests: no kernels for them" in out
