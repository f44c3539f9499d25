"""`vime models`: prints the model families with their status on CPU and GPU."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from slime.models import FAMILIES
from slime.models.status import STATUS

HEAD = ("model_type", "family", "models", "run on a CPU", "run on a GPU", "example")


def main(argv: Sequence[str]) -> int:
    """Prints one line per family."""
    parser = argparse.ArgumentParser(
        prog="vime models", description="The model families that vime trains, by model_type of config.json."
    )
    parser.parse_args(argv)
    print("\n".join(lines()))
    return 0


def rows() -> list[tuple[str, ...]]:
    """Returns the cells of the table, one row per family."""
    found: list[tuple[str, ...]] = []
    for name, family in FAMILIES.items():
        status = STATUS[name]
        found.append((name, family.title, family.models, status.cpu, status.gpu, status.example))
    return found


def lines() -> Iterator[str]:
    """Yields the table as text, and references to the documentation."""
    table = [HEAD, *rows()]
    widths = [max(len(row[i]) for row in table) for i in range(len(HEAD))]
    for row in table:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield ""
    yield "planned: the flags are accepted, and the family was never run there (docs/status.md)."
    yield (
        "quantised checkpoints: every family in fp8 with blocks, or compressed-tensors in fp8 or int4; gpt_oss is also "
        "read in mxfp4 (docs/models.md)."
    )
    yield "docs/adding-a-model.md shows how to add a family."
