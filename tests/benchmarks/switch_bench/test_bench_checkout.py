"""`vime bench` needs a checkout, because the wheel has no benchmarks."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

from vime.commands import bench

ROOT = Path(__file__).parents[3]


def test_the_wheel_has_no_benchmarks() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    packages = find_packages(str(ROOT), **settings)
    assert {"rl_kernel", "slime", "vime", "vime.view"} <= set(packages)
    assert not [name for name in packages if "bench" in name]


def test_an_installed_vime_names_the_command_for_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "BENCHMARKS", tmp_path / "benchmarks")
    with pytest.raises(
        ValueError, match="must run in a checkout of vime, got an installed package"
    ) as raised:
        bench.main(["plan", "F.yaml"])
    assert "run `vime bench plan F.yaml` there" in str(raised.value)
    assert "\n" not in str(raised.value)
