"""The audit log: who did what, when, and how much. It has no prompts, no samples, no values and no keys."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path


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

    def write(self, tenant: str | None, action: str, **fields: str | int | float | None) -> None:
        """Writes one line. `tenant` is None for a caller without a valid key."""
        line = {"time": round(time.time(), 3), "tenant": tenant, "action": action}
        self._file.write(
            json.dumps({**line, **{name: value for name, value in fields.items() if value is not None}})
            + "\n"
        )

    def close(self) -> None:
        self._file.close()
