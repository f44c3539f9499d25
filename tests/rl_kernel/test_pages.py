"""The examples of docs/operators run as printed. Blocks without an import are definitions."""

import re
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[2] / "docs" / "operators").glob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def examples(page):
    return [block for block in BLOCK.findall(page.read_text()) if "import" in block]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_run(page):
    assert examples(page), "every page shows a call"
    for block in examples(page):
        exec(compile(block, str(page), "exec"), {})
