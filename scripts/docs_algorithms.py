"""`python scripts/docs_algorithms.py`: the tables of docs/algorithms.md, from the records of estimators and surrogates.

A test fails when the tables are not what this script writes. The rest of the page is written by hand.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from slime.algo.estimators import ESTIMATORS, Estimator
from slime.algo.surrogates import SURROGATES, Surrogate

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path("docs/algorithms.md")
COMMAND = "python scripts/docs_algorithms.py"
HEADS = {
    "estimators": "| `--advantage-estimator` | Advantage | Policy loss | Source | File | Columns read | Example |\n"
    "| --- | --- | --- | --- | --- | --- | --- |\n",
    "surrogates": "| `--pg-loss-type` | Term of a token | Source | File | Columns read | Inside `linear_token_loss` |"
    " `grpo_loss` |\n| --- | --- | --- | --- | --- | --- | --- |\n",
    "aliases": "| Flag | Accepted names |\n| --- | --- |\n",
}
"""Name of a table -> its heading."""


def file_of(record: Estimator | Surrogate) -> str:
    """The file with the record, as a link from the page."""
    folder = "estimators" if isinstance(record, Estimator) else "surrogates"
    for path in sorted((ROOT / "slime/algo" / folder).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args and ast.unparse(node.args[0]) == repr(record.name):
                return f"[{path.name}](../slime/algo/{folder}/{path.name})"
    return ""


def source_of(record: Estimator | Surrogate) -> str:
    """The paper, as a link if it is an arXiv number."""
    if re.fullmatch(r"\d{4}\.\d{5}", record.source):
        return f"[{record.source}](https://arxiv.org/abs/{record.source})"
    return record.source


def estimators() -> Iterator[str]:
    for record in ESTIMATORS.values():
        reads = ", ".join(sorted({"rewards", *record.reads}))
        example = f"[{record.example}](../{record.example}/README.md)" if record.example else ""
        cells = (record.advantage, f"`{record.surrogate.name}`", source_of(record), file_of(record))
        yield f"| `{record.name}` | {' | '.join(cells)} | {reads} | {example} |\n"


def surrogates() -> Iterator[str]:
    for record in SURROGATES.values():
        reads = ", ".join(
            sorted({"advantages", *record.reads, *({"chosen_tokens"} if record.choose else ())})
        )
        inside = "no: whole sequences" if record.reads_sequences else "yes"
        cells = (record.policy, source_of(record), file_of(record), reads, inside)
        yield f"| `{record.name}` | {' | '.join(cells)} | {'yes' if record.fused else 'no'} |\n"


def aliases() -> Iterator[str]:
    from slime.rules.flags import ALIASES

    for flag, names in ALIASES.items():
        found = ", ".join(f"`{alias}` (`{name}`)" for alias, name in names.items())
        yield f"| `--{flag.replace('_', '-')}` | {found} |\n"


ROWS = {"estimators": estimators, "surrogates": surrogates, "aliases": aliases}


def table(name: str) -> str:
    """A table with its heading."""
    return HEADS[name] + "".join(ROWS[name]())


def page() -> str:
    """The whole page, with its tables replaced."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    for name, head in HEADS.items():
        before, _, rest = text.partition(head)
        text = before + table(name) + "\n" + rest.partition("\n\n")[2]
    return text


if __name__ == "__main__":
    (ROOT / PAGE).write_text(page(), encoding="utf-8")
    print(PAGE)
