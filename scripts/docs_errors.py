"""`python scripts/docs_errors.py`: checks that each error message has a remedy, in its text or in a note.

Lists the messages without a remedy, and the notes of docs/troubleshooting.toml that match no message. A test makes the
same check. `vime explain` reads the messages from the code (`vime/explain/sources.py`).
"""

from __future__ import annotations

import sys

from vime.explain.sources import NOTES, PACKAGES, ROOT, collected, find_remedy, fits, notes

CHECKED = (*PACKAGES, "benchmarks/switch_bench", "benchmarks/operator_bench")
"""The wheel has no benchmarks. `vime bench` of a checkout raises their errors."""


def without_remedy() -> list[str]:
    """Returns the messages without a remedy and without a note."""
    written = notes()
    return [f"{m.path}: {m.text}" for m in collected(ROOT, CHECKED) if not find_remedy(m, written)]


def unused_notes() -> list[str]:
    """Returns the notes without a message."""
    messages = collected(ROOT, CHECKED)
    return [key for key in notes() if not any(fits(key, message) for message in messages)]


if __name__ == "__main__":
    missing, unused = without_remedy(), unused_notes()
    if missing or unused:
        sys.exit(
            "\n".join(
                [
                    *(
                        f"{NOTES} must have a remedy for each message without one, got none for {m}"
                        for m in missing
                    ),
                    *(
                        f"{NOTES} must have notes that fit a message, got {key!r}, which fits none"
                        for key in unused
                    ),
                ]
            )
        )
