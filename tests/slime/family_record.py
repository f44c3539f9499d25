"""What the family tests measured, for scripts/docs_families.py: with VIME_FAMILY_RECORD=FILE, one line of JSON each."""

from __future__ import annotations

import json
import os

VARIABLE = "VIME_FAMILY_RECORD"


def note(model: str, what: str, value: float) -> None:
    """Record that `what` of a tiny model (a name of `family_cases.CASES`) was `value`. Nothing without the variable."""
    if path := os.environ.get(VARIABLE):
        with open(path, "a") as file:
            file.write(json.dumps({"model": model, "what": what, "value": float(value)}) + "\n")
