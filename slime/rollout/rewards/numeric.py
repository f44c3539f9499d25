"""Plain decimal numbers in text: finds them and compares them exactly, without floating point."""

from __future__ import annotations

import re

# A minus is a sign only if it cannot be a subtraction: "10-5" ends in 5, and "= -5" ends in -5.
_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
NUMBER = re.compile(rf"(?:(?<![\w)\]}}])[-−+])?\$?(?:{_WHOLE}(?:\.[0-9]+)?|\.[0-9]+)")
_PLAIN = re.compile(r"([-−+]?)\$?([0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?:\.([0-9]*))?")


def canonical_number(text: str) -> str | None:
    """`text` as a number in its shortest form, or None if `text` is not exactly one plain number.

    Two numbers are equal if and only if their canonical forms are: "$1,000.50" -> "1000.5", "-0" -> "0".
    A dollar sign before the number and a percent sign after it are dropped. Thousands separators must be at
    thousands.
    """
    text = text.strip().replace("\\$", "$").replace("{,}", ",")
    match = _PLAIN.fullmatch(text.removesuffix("%").removesuffix("\\").rstrip())
    if match is None or not (match[2] or match[3]):
        return None
    whole = match[2].replace(",", "").lstrip("0") or "0"
    fraction = (match[3] or "").rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return f"-{value}" if match[1] in ("-", "−") and value != "0" else value


def last_number(text: str) -> str | None:
    """Canonical form of the last plain number in `text`, or None."""
    found = NUMBER.findall(text.replace("\\$", "$").replace("{,}", ","))
    return canonical_number(found[-1]) if found else None
