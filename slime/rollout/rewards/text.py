"""Text functions that several rewards use: final part and boxed answer of a response, answer of a label."""

from __future__ import annotations

import re
from typing import Any

_BRACE_OR_ESCAPE = re.compile(r"\\.|[{}]", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_UNBRACED = re.compile(r"[^\s${}]+(?:\{[^\s$]*\})*")


def after_thinking(text: str) -> str:
    """The text after the last `</think>`, or all of `text` without one."""
    return text.rpartition("</think>")[2]


def extract_answer(text: str) -> str | None:
    """Content of the last `\\boxed{...}` or `\\fbox{...}` of `text`, braces balanced, or None.

    Also reads the form without braces, `\\boxed 5`. If the last box is empty or never closed (a truncated
    response), there is no answer, even if an earlier box has one.
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
    """The answer in a label: its boxed part, the part after GSM8K's `####`, or the whole label.

    ValueError if the label has no answer, because its reward could never be above 0.
    """
    if not isinstance(label, str | int | float) or isinstance(label, bool):
        raise ValueError(f"label must be text or a number, got {label!r}; check --label-key")
    text = str(label)
    answer = extract_answer(text) if _BOX.search(text) else text.rpartition("####")[2].strip()
    if not answer:
        raise ValueError(f"label must hold an answer, got {label!r}; check --label-key")
    return answer
