"""Logs warnings once per process. Imports the standard library only."""

from __future__ import annotations

import logging

_keys: set[str] = set()
"""Keys of the warnings that this process has logged."""


def warn_once(logger: logging.Logger, key: str, message: str, *values: object) -> None:
    """Logs `message % values` as a warning, unless this process has logged a warning with this `key` before."""
    if key not in _keys:
        _keys.add(key)
        logger.warning(message, *values)


def forget() -> None:
    """Allows every warning to be logged again. The tests call it, so that no test depends on an earlier one."""
    _keys.clear()
