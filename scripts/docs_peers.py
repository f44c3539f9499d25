"""`python scripts/docs_peers.py`: writes the tables of docs/from-trl.md and docs/from-verl.md.

The names come from slime/config/peer_names.py.

A test fails if a table is out of date. The other parts of the pages are written by hand.
"""

from __future__ import annotations

from pathlib import Path

from slime.config.peer_names import PAGES, PEER_NAMES
from slime.config.peer_rows import OTHERS, TRL
from vime.vllm.peer_names import VLLM_PEER_NAMES

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "python scripts/docs_peers.py"


def head(program: str) -> str:
    return f"| {program} | vime | Note |\n| --- | --- | --- |\n"


def table(program: str) -> str:
    """Returns a program's table with its heading. TRL's page also has names that several trainers use."""
    names = [*(PEER_NAMES | VLLM_PEER_NAMES).values()]
    rows = [each for each in names if each.program == program]
    if program == TRL:
        rows += [each for each in PEER_NAMES.values() if each.program == OTHERS]
    cells = [(f"`{each.name}`", f"`{each.shown}`" if each.flags else "none", each.note) for each in rows]
    return head(program) + "".join(f"| {' | '.join(each)} |\n" for each in cells)


def page(program: str) -> str:
    """Returns the whole page, with its table replaced."""
    text = (ROOT / PAGES[program]).read_text(encoding="utf-8")
    before, _, rest = text.partition(head(program))
    return before + table(program) + "\n" + rest.partition("\n\n")[2]


if __name__ == "__main__":
    for program, path in PAGES.items():
        (ROOT / path).write_text(page(program), encoding="utf-8")
        print(path)
