"""Records the measurements of the family tests for scripts/docs_families.py. With VIME_FAMILY_RECORD=FILE, each
measurement is one line of JSON."""

from __future__ import annotations

import json
import os

VARIABLE = "VIME_FAMILY_RECORD"


def note(model: str, what: str, value: float) -> None:
    """Records the value of `what` for a tiny model (a name in `family_cases.CASES`). Without the variable, it does
    nothing."""
    if path := os.environ.get(VARIABLE):
        with open(path, "a") as file:
            file.write(json.dumps({"model": model, "what": what, "value": float(value)}) + "\n")
