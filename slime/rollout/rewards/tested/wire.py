"""This module writes values as JSON: numbers, texts, bytes, dates, containers and arrays by value, other objects by
number.

A message has a table with the contents of its mutable containers, so that shared containers stay shared, cycles end,
and a reply can change the containers of its call.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import fractions
import re
import sys
from collections.abc import Callable
from typing import Any

Value = Any
"""A value of a program, which may have any class."""
Json = Any
"""A value that JSON can hold."""
_EXACT = 1 << 53
_PARTS = {range: ("start", "stop", "step"), slice: ("start", "stop", "step"), complex: ("real", "imag")}
_TEXTS: dict[type, Callable[[str], object]] = {
    decimal.Decimal: decimal.Decimal,
    fractions.Fraction: fractions.Fraction,
    datetime.datetime: datetime.datetime.fromisoformat,
    datetime.date: datetime.date.fromisoformat,
    datetime.time: datetime.time.fromisoformat,
}
_MUTABLE: dict[str, Callable[..., Value]] = {
    kind.__name__: kind
    for kind in (
        *(list, set, dict, bytearray, collections.deque),
        *(collections.OrderedDict, collections.Counter, collections.defaultdict),
    )
}
_WRITTEN: dict[type, Callable[[Value], Json]] = {
    float: float.hex,
    bytes: bytes.hex,
    type(Ellipsis): str,
    type(NotImplemented): str,
    datetime.timedelta: lambda span: [span.days, span.seconds, span.microseconds],
    **{kind: lambda one: one.isoformat() if hasattr(one, "isoformat") else str(one) for kind in _TEXTS},
}
_ARRAY_TYPE = re.compile(r"[<>|=][?biufc]\d+")
_names: dict[tuple[str, tuple[str, ...]], type] = {}


class Table:
    """The mutable containers of a message. In a reply, the containers of the call come first."""

    def __init__(self, pinned: list[Value]) -> None:
        self.objects, self.pinned = list(pinned), len(pinned)
        self._numbers = {id(item): number for number, item in enumerate(pinned)}

    def number(self, value: object) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self._numbers[id(value)]


class Writer:
    """Writes values as JSON. `reference` returns the JSON of an object without a plain value."""

    def __init__(self, table: Table, reference: Callable[[object], Json]) -> None:
        self.table, self._reference = table, reference

    def value(self, value: Value) -> Json:
        kind: type[Value] = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if -_EXACT < value < _EXACT else ["int", hex(value)]
        if kind in _WRITTEN:
            return [kind.__name__, _WRITTEN[kind](value)]
        if _MUTABLE.get(kind.__name__) is kind or _is_array(value):
            return ["at", self.table.number(value)]
        if kind in (tuple, frozenset):
            return [kind.__name__, [self.value(item) for item in value]]
        if kind in _PARTS:
            return [kind.__name__, [self.value(getattr(value, part)) for part in _PARTS[kind]]]
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return ["named", [kind.__name__, list(kind._fields), [self.value(item) for item in value]]]
        name = getattr(value, "__name__", "") if kind is type else ""
        if name and getattr(builtins, name, None) is value:
            return ["class", name]
        return self._reference(value)

    def contents(self) -> list[Json]:
        """Returns the contents of the whole table, which grows while its containers are written."""
        found: list[Json] = []
        while len(found) < len(self.table.objects):
            found.append(self._content(self.table.objects[len(found)]))
        return found

    def _content(self, value: Value) -> Json:
        kind = type(value)
        if _is_array(value):
            return ["array", [value.dtype.str, list(value.shape), value.tobytes().hex()]]
        if kind is bytearray:
            return ["bytearray", value.hex()]
        more = {"deque": "maxlen", "defaultdict": "default_factory"}.get(kind.__name__)
        extra = self.value(getattr(value, more)) if more else None
        items = value.items() if isinstance(value, dict) else value
        return [kind.__name__, [self.value(item) for item in items], extra]


class Reader:
    """Reads values from JSON. `referenced` returns the object of a reference. A wrong message may raise any error."""

    def __init__(
        self,
        table: Table,
        contents: list[Json],
        referenced: Callable[[Json], Value],
        builtin_class: Callable[[str], type],
    ) -> None:
        self.table, self._referenced, self._builtin_class = table, referenced, builtin_class
        for content in contents[table.pinned :]:
            table.objects.append(self._empty(content))
        for number, content in enumerate(contents):
            if content is not None:
                self._fill(table.objects[number], content)

    def value(self, written: Json) -> Value:
        if not isinstance(written, list):
            return written
        kind, content = written
        if kind == "at":
            return self.table.objects[content]
        if kind in ("tuple", "frozenset", "range", "slice", "complex"):
            parts = [self.value(item) for item in content]
            return getattr(builtins, kind)(*([parts] if kind in ("tuple", "frozenset") else parts))
        for text_kind, read in _TEXTS.items():
            if kind == text_kind.__name__:
                return read(content)
        simple: dict[str, Callable[[Value], object]] = {
            "int": lambda text: int(text, 16),
            "float": float.fromhex,
            "bytes": bytes.fromhex,
            "timedelta": lambda parts: datetime.timedelta(*parts),
            "ellipsis": lambda _: Ellipsis,
            "NotImplementedType": lambda _: NotImplemented,
            "class": self._builtin_class,
            "named": self._named,
        }
        return simple[kind](content) if kind in simple else self._referenced(written)

    def _named(self, content: Json) -> object:
        name, fields, items = content
        key = (name, tuple(fields))
        if key not in _names:
            _names[key] = collections.namedtuple(name, fields)
        return _names[key](*(self.value(item) for item in items))

    def _empty(self, content: Json) -> Value:
        if content[0] == "array":
            return _array(content[1])
        extra = self.value(content[2]) if content[0] == "defaultdict" else None
        if content[0] == "deque":
            return collections.deque(maxlen=self.value(content[2]))
        kind = _MUTABLE[content[0]]
        return kind(extra) if content[0] == "defaultdict" else kind()

    def _fill(self, target: Value, content: Json) -> None:
        if content[0] == "array":
            target[...] = _array(content[1])
        elif content[0] == "bytearray":
            target[:] = bytes.fromhex(content[1])
        else:
            items = [self.value(item) for item in content[1]]
            target.clear()
            (target.update if isinstance(target, dict | set) else target.extend)(
                dict(items) if isinstance(target, dict) else items
            )


def builtin_class(name: str) -> type:
    found = getattr(builtins, name)
    if not isinstance(found, type):
        raise TypeError(name)
    return found


def _is_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and value.dtype.kind in "?biufc"  # type: ignore[attr-defined]


def _array(content: Json) -> Value:
    import numpy as np

    kind, shape, data = content
    if not _ARRAY_TYPE.fullmatch(kind):
        raise TypeError(kind)
    return np.frombuffer(bytes.fromhex(data), dtype=kind).reshape(shape).copy()
