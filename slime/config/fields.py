"""Declares flags in the sections of the configuration, and converts command-line strings to their typed values.

A section is a frozen dataclass. `flag` makes its fields. Field name and flag name are the same words
(`rollout_batch_size`, `--rollout-batch-size`). The annotation gives the type: bool, int, float, str, dict (JSON),
`list[...]` (a list of values). `| None` means that the value may be absent. A flag with the default None whose
annotation lacks `| None` has a value once the configuration is resolved: a rule requires it, or resolve fills it in.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from slime.config.peer_names import instead
from slime.config.ranges import Range
from slime.records.errors import FlagError

Values: TypeAlias = dict[str, Any]
"""Field name -> value. Its section declares the types."""

TRUE_WORDS = ("true", "1", "yes", "on")
FALSE_WORDS = ("false", "0", "no", "off")


def flag(
    default: object,
    help: str,
    *,
    choices: Iterable[object] | None = None,
    append: bool = False,
    secret: bool = False,
    range: Range | None = None,
    commas: bool = False,
) -> Any:
    """Makes a dataclass field that is a flag. A number without `choices` must have a `range`.

    `append` collects repeated uses. A saved file masks a `secret` value. With `commas`, "a,b" and the values a and b
    are the same: a list of values, or one text with commas.
    """
    meta = {
        "help": help,
        "choices": tuple(choices) if choices else None,
        "append": append,
        "secret": secret,
        "range": range,
        "commas": commas,
    }
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=meta)
    return dataclasses.field(default=default, metadata=meta)


def spelled(name: str) -> str:
    """Returns the flag of a field name: "rollout_seed" -> "--rollout-seed"."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class FlagSpec:
    """Describes one flag."""

    name: str
    kind: type | Callable[[str], object]
    """Converts a string to one value."""
    default: object
    help: str
    many: bool = False
    """True if the flag has a list of values."""
    bare: bool = False
    """True if one value stays without a list, as for `str | list[str]`."""
    append: bool = False
    """True if repeated uses are collected."""
    choices: tuple[object, ...] | None = None
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Other names of values, which are read as these values."""
    secret: bool = False
    """True if a saved file masks the value."""
    range: Range | None = None
    """Range of a number without `choices`."""
    commas: bool = False
    """True if "a,b" and the values a and b are the same."""
    filled: bool = False
    """True if the default is None and the resolved value is not."""

    def parse(self, values: list[str], typed: str) -> Any:
        """Returns the typed value of the strings after the flag. `typed` is the flag as the user spelled it."""
        if self.kind is bool:
            return self._parse_bool(values, typed)
        if self.commas and values:
            values = [",".join(values)] if not self.many else ",".join(values).split(",")
        if self.many:
            found = [self._parse_one(v, typed) for v in values]
            return found[0] if self.bare and len(found) == 1 else found
        if len(values) != 1:
            raise FlagError(typed, "be followed by one value", f"{len(values)}: {' '.join(values) or 'none'}")
        return self._parse_one(values[0], typed)

    def _parse_bool(self, values: list[str], typed: str) -> bool:
        word = values[0].lower() if len(values) == 1 else ""
        if not values or word in TRUE_WORDS:
            return True
        if word in FALSE_WORDS:
            return False
        raise FlagError(typed, "stand alone or be true or false", f"{' '.join(values)!r}")

    def _parse_one(self, text: str, typed: str) -> object:
        try:
            value = json.loads(text) if self.kind is dict else self.kind(self.aliases.get(text, text))
        except ValueError as error:
            wanted = "a JSON object" if self.kind is dict else f"of type {self.kind.__name__}"
            raise FlagError(typed, f"be {wanted}", f"{text!r}") from error
        if self.kind is dict and not isinstance(value, dict):
            raise FlagError(typed, "be a JSON object", f"{text!r}")
        if self.choices and value not in self.choices:
            raise FlagError(
                typed,
                f"be one of {', '.join(map(str, self.choices))}",
                f"{value}{instead(self.name, value, self.choices)}",
            )
        if self.range and (rule := self.range.problem(typing.cast(float, value))):
            raise FlagError(typed, rule, value)
        return value


@functools.cache
def get_specs(section: type) -> dict[str, FlagSpec]:
    """Returns field name -> spec, for the section's fields that `flag` made. Other fields are results, not flags."""
    hints = typing.get_type_hints(section)
    specs = {}
    for f in dataclasses.fields(section):
        if "help" not in f.metadata:
            continue
        kind, many, absent, bare = _read_hint(hints[f.name])
        if kind in (int, float) and not (f.metadata["range"] or f.metadata["choices"]):
            raise TypeError(
                f"{section.__name__}.{f.name} is a number without a range of slime/config/ranges.py"
            )
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        filled = default is None and not absent
        specs[f.name] = FlagSpec(f.name, kind, default, many=many, bare=bare, filled=filled, **f.metadata)
    return specs


def _read_hint(hint: object) -> tuple[type, bool, bool, bool]:
    """Returns (type of one value, whether it is a list, whether it may be absent, whether one value may be given
    without a list) for an annotation."""
    parts = [hint]
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        parts = list(typing.get_args(hint))
    present = [part for part in parts if part is not type(None)]
    one = present[-1]  # the list in `str | list[str]`
    many = typing.get_origin(one) is list
    value = typing.get_args(one)[0] if many else one
    kind = typing.get_origin(value) or value
    return typing.cast("type", kind), many, len(present) < len(parts), many and len(present) > 1
