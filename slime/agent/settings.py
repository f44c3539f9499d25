"""Reads the environment variables of agents. The names are those of slime, of upstream vime, and of their older
coding-agent examples."""

from __future__ import annotations

import json
import os

_PREFIXES = ("SLIME_AGENT_", "VIME_AGENT_", "SWE_", "SWE_HOST_")


def setting(name: str) -> str | None:
    """Returns the first of SLIME_AGENT_`name`, VIME_AGENT_`name`, SWE_`name` and SWE_HOST_`name` that is set and not
    empty, or None."""
    found = (os.environ.get(prefix + name, "").strip() for prefix in _PREFIXES)
    return next(filter(None, found), None)


def extra_environment(name: str) -> dict[str, str]:
    """Returns the variables of the setting `name`, a JSON object. Raises ValueError for another value."""
    text = setting(name) or "{}"
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(
            f"{_PREFIXES[0]}{name} must be a JSON object of environment variables, got {text!r:.80}; "
            """write '{"NAME": "value"}'"""
        )
    return {str(key): str(value) for key, value in found.items()}
