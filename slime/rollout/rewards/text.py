"""What several rewards read from text: final part and boxed answer of a response, the answer in a label."""

from __future__ import annotations

import re
from typing import Any

_BRACE_OR_ESCAPE = re.compile(r"\\.|[{}]", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_UNBRACED = re.compile(r"[^\s${}]+(?:\{[^\s$]*\})*")


def after_thinking(text: str) -> str:
    """What follows the last `</think>`, or all of `text` when there is none."""
    return text.rpartition("</think>")[2]


def extract_answer(text: str) -> str | None:
    """Content of the last `\\boxed{...}` or `\\fbox{...}` of `text`, braces balanced, or None.

    Also reads the brace-less form `\\boxed 5`. A box that is never closed (a truncated response) or is empty
    is no answer; an earlier box does not stand in for it.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    start = boxes[-1].end()
    if not text.startswith("{", start):
        bare = _UNBRACED.match(text, start)
        return (bare[0].rstrip(".,;:") or None) if bare else None
    depth = 0
    for token in _BRACE_OR_ESCAPE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return text[start + 1 : token.start()].strip() or None
    return None


def expected_answer(label: Any) -> str:
    """The answer a label holds: its boxed part, the part after GSM8K's `####`, or all of it.

    Raises ValueError for a label that holds none: a reward that can never be earned hides a fault of the
    data.
    """
    if not isinstance(label, str | int | float) or isinstance(label, bool):
        raise ValueError(f"label must be text or a number, got {label!r}; check --label-key")
    text = str(label)
    answer = extract_answer(text) if _BOX.search(text) else text.rpartition("####")[2].strip()
    if not answer:
        raise ValueError(f"label must hold an answer, got {label!r}; check --label-key")
    return answer
