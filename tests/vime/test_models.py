"""`vime models`, and the table of docs/models.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slime.models import FAMILIES, family_for
from slime.models.status import STATUS
from vime.cli import main
from vime.models import rows

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_family_is_printed_with_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[1 : 1 + len(FAMILIES)]] == list(FAMILIES)
    assert printed[1].split()[-1] == "planned" and "tiny model" in printed[1]
    assert STATUS.keys() <= FAMILIES.keys()


def test_the_page_has_the_same_table() -> None:
    table = (DOCS / "models.md").read_text().partition("| --- |")[2].partition("\n\n")[0].splitlines()[1:]
    cells = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table]
    assert cells == [[title, name, *rest] for name, title, *rest in rows()]


def test_an_unknown_family_is_told_where_to_look() -> None:
    known = ", ".join(sorted(FAMILIES))
    with pytest.raises(
        ValueError, match=re.escape(f"must be one of {known}, got 'mamba'; docs/adding-a-model.md")
    ):
        family_for({"model_type": "mamba"})
    assert (DOCS / "adding-a-model.md").is_file()
