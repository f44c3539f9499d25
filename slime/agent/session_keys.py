"""The keys of sessions that plug-ins name: 32 random bytes for each session, under its name while it is open."""

from __future__ import annotations

import re
import secrets

KEY_BYTES = 32
_RANDOM = re.compile(r"[0-9a-f]{64,}")
_SAMPLES_OWN = re.compile(r".*/\d+(/.*)?", re.DOTALL)
_keys: dict[str, str] = {}


def issue(name: str) -> str:
    """A new key for the session `name` of an adapter."""
    _keys[name] = secrets.token_urlsafe(KEY_BYTES)
    return _keys[name]


def withdraw(name: str, key: str) -> None:
    """The session with this key has ended."""
    if _keys.get(name) == key:
        del _keys[name]


def key_of(name: str) -> str:
    """What an agent of the session `name` shows: its key, or the name where no adapter of this process opened it."""
    return _keys.get(name, name)


def is_key(name: str, *, loopback: bool) -> bool:
    """Whether the name of an open session may be its key, too. A name of 64 hexadecimal digits or more may. Other names
    can be guessed, so they may on `loopback` alone; the `session_id` of a sample (`rollout/3`) never may."""
    return bool(_RANDOM.fullmatch(name)) or (loopback and not _SAMPLES_OWN.fullmatch(name))
