"""Reads JSON from clients (bodies) and from the model (arguments of calls), and defines the allowed JSON."""

from __future__ import annotations

import msgspec

DEEPEST = 100
"""Maximum number of nested objects and lists. The limit protects recursive code that reads the values later."""


def read_json(text: str | bytes) -> object:
    """Returns the value of a JSON text (RFC 8259). Raises ValueError for any other text, such as NaN, half of a
    surrogate pair, a number that no double can hold, or bytes that are not UTF-8. Also raises ValueError for more than
    `DEEPEST` levels."""
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
    """Returns the number of levels of objects and lists, but at most `DEEPEST` + 1."""
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
    """Returns a call's arguments as an object. A text that is no JSON object becomes {"arguments": text}, because every
    dialect has such an object, and clients return the object unchanged."""
    try:
        value = read_json(arguments or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def as_unicode(text: str) -> str:
    """Replaces each half of a surrogate pair by its JSON escape, so that the result can be encoded as UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
