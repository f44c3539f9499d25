"""`python scripts/docs_models.py`: writes the tables of model families in README.md, docs/models.md and docs/status.md.

All three tables come from slime/models/status.py. Each table is between two marks. A test fails if a page differs from
the output of this script.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from slime.models import FAMILIES
from slime.models.status import PLANNED, STATUS

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "python scripts/docs_models.py"
BEGIN, END = "<!-- families: begin, written by scripts/docs_models.py -->", "<!-- families: end -->"

Row = Sequence[str]


def by_maker() -> Iterator[Row]:
    """Yields the rows of README.md, one per maker."""
    yield ("name", "families", "run on CPUs", "run on GPUs")
    for maker in dict.fromkeys(status.maker for status in STATUS.values()):
        types = [name for name, status in STATUS.items() if status.maker == maker]
        cpu = ["tiny models", *(STATUS[name].larger for name in types if STATUS[name].larger)]
        if narrow := titles([name for name in types if STATUS[name].engine != "float32"]):
            cpu.append(f"engines of {narrow} in bfloat16")
        gpu = [STATUS[name].gpu for name in types if STATUS[name].gpu != PLANNED]
        yield (maker, titles(types), "; ".join(cpu), "; ".join(gpu) or PLANNED)


def titles(types: Sequence[str]) -> str:
    """Returns the names of the families with these `model_type`s, each name once."""
    return ", ".join(dict.fromkeys(FAMILIES[name].title.partition(",")[0] for name in types))


def by_family() -> Iterator[Row]:
    """Yields the rows of docs/models.md, one per `model_type`."""
    yield ("Family", "`model_type`", "Models", "Configurations")
    for name, family in FAMILIES.items():
        example = STATUS[name].example
        yield (family.title, f"`{name}`", family.models, f"[{example}](../examples/{example}/README.md)")


def by_run() -> Iterator[Row]:
    """Yields the rows of docs/status.md, which list each family's runs."""
    yield ("Family", "`model_type`", "Log-probs compared with vLLM", "GRPO steps on a CPU", "On a GPU")
    for name, family in FAMILIES.items():
        status = STATUS[name]
        more = f", and {status.larger}" if status.larger else ""
        steps = f"yes{more}" if status.steps else "no"
        yield (family.title, f"`{name}`", status.engine, steps, status.gpu)


TABLES = {
    Path("README.md"): by_maker,
    Path("docs/models.md"): by_family,
    Path("docs/status.md"): by_run,
}


def page(path: Path) -> str:
    """Returns a page with its table between the two marks."""
    head, *rows = TABLES[path]()
    table = [head, ["---"] * len(head), *rows]
    before, rest = (ROOT / path).read_text(encoding="utf-8").split(BEGIN)
    lines = [f"| {' | '.join(cells)} |" for cells in table]
    return "\n".join([f"{before}{BEGIN}", *lines, END]) + rest.split(END)[1]


if __name__ == "__main__":
    for path in TABLES:
        (ROOT / path).write_text(page(path), encoding="utf-8")
        print(path)
