"""`python scripts/docs_algorithms.py`: the table of advantage estimators in docs/algorithms.md, from their records.

A test fails when the table is not what this script writes. The rest of the page is written by hand.
"""

from __future__ import annotations

from pathlib import Path

from slime.algo.estimators import ESTIMATORS

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path("docs/algorithms.md")
COMMAND = "python scripts/docs_algorithms.py"
HEADER = "| `--advantage-estimator` | Advantage | Policy loss |\n| --- | --- | --- |\n"


def table() -> str:
    """One row per estimator."""
    rows = []
    for record in ESTIMATORS.values():
        rows.append(f"| `{record.name}` | {record.advantage} | {record.policy} |\n")
    return HEADER + "".join(rows)


def page() -> str:
    """The whole page, with its table replaced."""
    before, _, rest = (ROOT / PAGE).read_text(encoding="utf-8").partition(HEADER)
    return before + table() + "\n" + rest.partition("\n\n")[2]


if __name__ == "__main__":
    (ROOT / PAGE).write_text(page(), encoding="utf-8")
    print(PAGE)
