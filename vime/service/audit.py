"""The audit log: who did what, when, and how much. It has no prompts, no samples, no values and no keys."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path

REFUSAL_S = 1.0
"""Least seconds between two lines about refusals of one tenant with one status."""


class AuditLog:
    """Appends one JSON line per action to a file that only its owner may read."""

    def __init__(self, path: Path) -> None:
        self._file = open(  # noqa: SIM115  # closed by close
            path,
            "a",
            buffering=1,
            encoding="utf-8",
            opener=lambda name, flags: os.open(name, flags, 0o600),
        )
        self._refused: dict[tuple[str | None, int], float] = {}
        self._left_out = Counter[tuple[str | None, int]]()

    def write(self, tenant: str | None, action: str, **fields: str | int | float | None) -> None:
        """Writes one line. `tenant` is None for a caller without a valid key."""
        line = {"time": round(time.time(), 3), "tenant": tenant, "action": action}
        self._file.write(
            json.dumps({**line, **{name: value for name, value in fields.items() if value is not None}})
            + "\n"
        )

    def refuse(self, tenant: str | None, status: int, **fields: str | int | float | None) -> None:
        """Writes a line about a refusal, or counts it for the next line: a caller who floods must not fill the disk."""
        key, now = (tenant, status), time.monotonic()
        if now - self._refused.get(key, -REFUSAL_S) < REFUSAL_S:
            self._left_out[key] += 1
            return
        self._refused[key] = now
        self.write(tenant, "refused", status=status, **fields, left_out=self._left_out.pop(key, None))

    def close(self) -> None:
        for (tenant, status), count in self._left_out.items():
            self.write(tenant, "refused", status=status, left_out=count)
        self._file.close()
