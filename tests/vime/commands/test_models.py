"""Tests `vime models`, and the table behind it and behind the pages (tests/house/pages/test_docs.py)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from architectures import ARCHITECTURES
from family_cases import CASES
from vision_architectures import VISION_ARCHITECTURES

from slime.models import FAMILIES, family_for
from slime.models.status import STATUS
from vime.cli import main

ROOT = Path(__file__).resolve().parents[3]
DOCS, EXAMPLES = ROOT / "docs", ROOT / "examples"
OWN_RUNS = {"qwen2", "qwen3", "qwen3_moe", "qwen3_vl", "glm4_moe"}
"""Families whose whole runs are in separate tests."""


def test_every_family_is_printed_with_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[1 : 1 + len(FAMILIES)]] == list(FAMILIES)
    assert printed[1].split()[-1] == "qwen2.5-7b" and "tiny model" in printed[1]
    assert STATUS.keys() == FAMILIES.keys()


def test_the_status_says_what_the_tests_run() -> None:
    """An engine's dtype is that of the family's case. A family with GRPO steps has a tiny model that runs them."""
    engines = {case.kind: case.dtype for case in CASES.values() if case.engine}
    assert {name: STATUS[name].engine for name in engines} == engines
    text = (ROOT / "tests/e2e/runs/test_train_families.py").read_text()  # an import would import Megatron
    archs = re.findall(r'"([\w-]+)"', re.search(r"^ARCHS = \((.*?)\)", text, re.M | re.S)[1])
    trained = {ARCHITECTURES[arch].family for arch in archs} | OWN_RUNS
    assert {name for name, status in STATUS.items() if status.steps} == trained


def test_every_family_has_configurations() -> None:
    """tests/scripts/test_examples.py plans them."""
    for name, status in STATUS.items():
        family = {**ARCHITECTURES, **VISION_ARCHITECTURES}[status.example].family
        assert (EXAMPLES / status.example / "README.md").is_file(), name
        assert family.removesuffix("_text") == name.removesuffix("_text"), name


def test_an_unknown_family_is_told_where_to_look() -> None:
    known = ", ".join(sorted(FAMILIES))
    with pytest.raises(
        ValueError, match=re.escape(f"must be one of {known}, got 'mamba'; docs/adding-a-model.md")
    ):
        family_for({"model_type": "mamba"})
    assert (DOCS / "adding-a-model.md").is_file()
