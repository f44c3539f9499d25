"""The environment of child processes: which variables a child gets that needs no key."""

from __future__ import annotations

import os

from slime.config.secrets import is_secret

RUN_KEY = "VIME_RUN_KEY"
"""Holds the key of every server of a run."""


def without_secrets() -> dict[str, str]:
    """This process's environment for a child that works for the run alone: without keys, tokens and passwords.

    A child that reads a model's text, or stays as long as the run, must not hand them out.
    """
    return {name: value for name, value in os.environ.items() if not is_secret(name)}


NO_KEY = (
    "the run's key is needed (Authorization: Bearer <key>): slime.utils.http_utils.post adds it, and plug-ins that use "
    "that function need no change"
)
"""The answer of the run's servers to a request without the key, with status 401."""
