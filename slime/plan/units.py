"""Formats numbers and bytes for people."""

from __future__ import annotations

GIB = 2**30

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def count(number: float) -> str:
    """Formats a number: 1234567 -> "1.23 M"."""
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:g}"


def amount(size: float) -> str:
    """Formats bytes in binary units."""
    for unit, scale in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size:.0f} B"
