"""Reads Megatron's flags from a table with the known versions of megatron-core.

Importing megatron-core takes seconds, and most processes that read flags do not need it otherwise.
`scripts/docs_core_flags.py` writes the table.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from slime.bridges import megatron_versions
from slime.config.fields import FlagSpec
from slime.config.megatron_flags import CoreFlag, dtype_name, imported_core_flags, json_or_text
from slime.config.ranges import COUNT_OR_ZERO
from slime.records.errors import FlagError

TABLE = Path(__file__).parent / "core_flags.json"
"""Path of the table, {version: {flag: row}}."""
_KINDS: dict[str, type | Callable[[str], object]] = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "dtype": dtype_name,
    "json": json_or_text,
}


class FlagRow(TypedDict):
    """A flag as JSON: fields of CoreFlag and FlagSpec, the name of its kind, and whether a number is a count."""

    field: str
    negated: bool
    name: str
    kind: str
    default: object
    help: str
    many: bool
    choices: list[object] | None
    counts: bool


@functools.cache
def core_flags() -> dict[str, CoreFlag]:
    """Returns flag name (with underscores) -> flag, for every settable field of megatron-core's configs.

    The flags come from the table, or from megatron-core itself if the table does not have its version. Raises
    ValueError if megatron-core is missing.
    """
    rows = json.loads(TABLE.read_text(encoding="utf-8")).get(megatron_versions.installed())
    return imported_core_flags() if rows is None else {name: make_flag(row) for name, row in rows.items()}


def make_row(flag: CoreFlag) -> FlagRow:
    """Converts a flag to JSON. Raises ValueError for a flag that the row cannot express."""
    spec = flag.spec
    row: FlagRow = {
        "field": flag.field,
        "negated": flag.negated,
        "name": spec.name,
        "kind": next(name for name, kind in _KINDS.items() if kind is spec.kind),
        "default": spec.default,
        "help": spec.help,
        "many": spec.many,
        "choices": None if spec.choices is None else list(spec.choices),
        "counts": spec.range is not None,
    }
    if make_flag(json.loads(json.dumps(row))) != flag:
        raise FlagError("a flag of megatron-core", f"be a row of {TABLE.name}", flag, "give rows more fields")
    return row


def make_flag(row: FlagRow) -> CoreFlag:
    """Converts a row to a flag."""
    spec = FlagSpec(row["name"], _KINDS[row["kind"]], row["default"], row["help"], many=row["many"])
    if isinstance(spec.default, list):  # JSON has no tuples, and dataclasses allow no list as a default
        spec = dataclasses.replace(spec, default=tuple(spec.default))
    if row["choices"] is not None:
        spec = dataclasses.replace(spec, choices=tuple(row["choices"]))
    if row["counts"]:
        spec = dataclasses.replace(spec, range=COUNT_OR_ZERO)
    return CoreFlag(row["field"], spec, row["negated"])
