"""Reads JSON that others wrote: bodies of clients, and arguments of the model's calls. Owns which JSON is allowed."""

from __future__ import annotations

import msgspec

DEEPEST = 100
"""Most levels of objects and lists. Code that recurses compares, renders and writes the values."""


def read_json(text: str | bytes) -> object:
    """The value of a JSON text (RFC 8259). ValueError for anything else, such as NaN, half of a surrogate pair, a
    number that no double can hold, or bytes that are not UTF-8; and for more than `DEEPEST` levels."""
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        value = None
        deep = True
    else:
        deep = _levels(value) > DEEPEST
    if deep:
        raise ValueError(f"JSON must have at most {DEEPEST} levels, got more; make it flatter")
    return value


def _levels(value: object) -> int:
    """Number of levels of objects and lists, counted up to one more than `DEEPEST`."""
    count, level = 0, [value]
    while count <= DEEPEST:
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        count += 1
        if not level:
            break
    return count


def as_object(arguments: str) -> dict[str, object]:
    """The arguments of a call as an object. A text of another kind becomes an object with the text: each dialect can
    carry that, and a client sends it back unchanged."""
    try:
        value = read_json(arguments or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def as_unicode(text: str) -> str:
    """The text with each half of a surrogate pair as the escape that JSON has for it. The result always has a UTF-8
    form."""
    return text.encode("utf-8", "backslashreplace").decode()
