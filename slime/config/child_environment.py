"""Defines the environment of child processes that need no key."""

from __future__ import annotations

import os

from slime.config.secrets import is_secret

RUN_KEY = "VIME_RUN_KEY"
"""Name of the variable with the key of every server of a run."""


def without_secrets() -> dict[str, str]:
    """Returns this process's environment without keys, tokens and passwords, for a child that works for the run only.

    A child that reads a model's text, or lives as long as the run, must not be able to disclose them.
    """
    return {name: value for name, value in os.environ.items() if not is_secret(name)}


NO_KEY = (
    "the run's key is needed (Authorization: Bearer <key>): slime.utils.http_utils.post adds it, and plug-ins that use "
    "that function need no change"
)
"""Answer of the run's servers to a request without the key, with status 401."""
