"""Stores the keys of sessions that plug-ins name. A key has 32 random bytes, and is stored while the session is
open."""

from __future__ import annotations

import re
import secrets

KEY_BYTES = 32
_RANDOM = re.compile(r"[0-9a-f]{64,}")
_SAMPLES_OWN = re.compile(r".*/\d+(/.*)?", re.DOTALL)
_keys: dict[str, str] = {}


def issue(name: str) -> str:
    """Makes and stores a new key for the session `name` of an adapter."""
    _keys[name] = secrets.token_urlsafe(KEY_BYTES)
    return _keys[name]


def withdraw(name: str, key: str) -> None:
    """Removes the key of a session that has ended."""
    if _keys.get(name) == key:
        del _keys[name]


def key_for(name: str) -> str:
    """Returns the key of the session `name`, or the name if no adapter of this process has opened the session."""
    return _keys.get(name, name)


def is_key(name: str, *, loopback: bool) -> bool:
    """Returns True if the name of an open session may also be its key. This holds for a name of at least 64 hexadecimal
    digits. Other names can be guessed, so they may be keys only on `loopback`. The `session_id` of a sample
    (`rollout/3`) is never a key."""
    return bool(_RANDOM.fullmatch(name)) or (loopback and not _SAMPLES_OWN.fullmatch(name))
