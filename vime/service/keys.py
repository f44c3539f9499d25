"""The keys of tenants. A key is printed once. The file has only the keys' hashes, and only its owner may read it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

PREFIX = "tml-"
"""The client accepts only keys that begin so."""
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


class TenantKeys:
    """Finds the tenant of a key. `path` is the file of hashes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hashes: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if path.exists() and path.stat().st_mode & 0o077:
            raise ValueError(
                f"{path} must be readable only by its owner, got mode {path.stat().st_mode & 0o777:o}; "
                f"run chmod 600 {path}"
            )

    @property
    def tenants(self) -> list[str]:
        return list(self._hashes)

    def add_missing(self, tenants: Sequence[str]) -> dict[str, str]:
        """Creates a key for each tenant without a key. Returns the new keys. Only their hashes are stored."""
        new = {}
        for tenant in tenants:
            if not _NAME.fullmatch(tenant):
                raise ValueError(
                    f"--tenants must be names of a-z, 0-9, _ and - with at most 32 characters, got {tenant!r}; "
                    "separate names with commas"
                )
            if tenant not in self._hashes:
                new[tenant] = PREFIX + secrets.token_urlsafe(32)
                self._hashes[tenant] = _digest(new[tenant])
        if new:
            written = self._path.with_suffix(".new")
            with open(
                written, "w", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)
            ) as file:
                json.dump(self._hashes, file, indent=1)
            written.replace(self._path)
        return new

    def find(self, key: str) -> str | None:
        """Returns the tenant of a key. All hashes are compared, each in constant time."""
        digest = _digest(key)
        found = [tenant for tenant, known in self._hashes.items() if secrets.compare_digest(digest, known)]
        return found[0] if found else None


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
