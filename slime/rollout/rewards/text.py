"""This module finds the final part and the boxed answer of a response, and the answer of a label, for rewards."""

from __future__ import annotations

import math
import numbers
import re
from decimal import Decimal

_BRACE_OR_ESCAPE = re.compile(r"\\.|[{}]", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_UNBRACED = re.compile(r"[^\s${}]+(?:\{[^\s$]*\})*")
_KEYWORDS = (
    r"eos|bos|eot|eom|eod|sos|pad|unk|sep|cls|mask|sop|eop|end|start|begin|turn|stop|return|special|reserved|unused"
    r"|extra_id|token|endoftext|im_end|end_of_\w+|gmask|smask|inst"
)
_NAME = rf"(?:[\w▁:.-]*(?:{_KEYWORDS})(?![A-Za-z])[\w▁:.-]*|(?:{_KEYWORDS})[\w▁:.-]*)"
_SPECIAL = re.compile(
    r"<\|[^<>|]*\|>|<｜[^<>｜]*｜>|<\|[\w▁]+>|<[\w▁]+\|>|\[\|[^\[\]|]*\|\]"
    rf"|</?s>|<\[?/?{_NAME}\]?>|\[/?{_NAME}\]"
    r"|[\[\]][a-z!]*~[a-z!~]*[\[\]]",  # MiniMax
    re.IGNORECASE,
)
_LONGEST_SPECIAL = 128
"""Maximum length in characters of a special token. The limit keeps the time proportional to the response's length."""
_SPACES = re.compile(r"\s*")
_SPECIAL_INSIDE = re.compile(r"<\|[\w▁]+\|>|<｜[\w▁]+｜>")


def after_thinking(text: str) -> str:
    """Returns the text after the last `</think>`, or all of `text` if it contains no `</think>`."""
    return text.rpartition("</think>")[2]


def _last_box(text: str) -> tuple[slice, slice] | None:
    """Returns the positions of the last box and of its content, or None if there is no box or its brace is open."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    begin, start = boxes[-1].start(), boxes[-1].end()
    if not text.startswith("{", start):
        bare = _UNBRACED.match(text, start)
        end = start + len(bare[0].rstrip(".,;:")) if bare else start
        return (slice(begin, end), slice(start, end)) if end > start else None
    depth = 0
    for token in _BRACE_OR_ESCAPE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return slice(begin, token.end()), slice(start + 1, token.start())
    return None


def extract_answer(text: str) -> str | None:
    """Returns the content of the last `\\boxed{...}` or `\\fbox{...}` of `text`, braces balanced, or None.

    Also reads the form without braces, `\\boxed 5`. If the last box is empty or never closed (a truncated
    response), returns None, even if an earlier box contains an answer.
    """
    box = _last_box(text)
    return None if box is None else text[box[1]].strip() or None


def last_boxed_only_string(string: str) -> str | None:
    """Returns the last box of a text with its command, such as `\\boxed{5}`, or None without a closed box."""
    box = _last_box(string)
    return None if box is None else string[box[0]]


def remove_boxed(s: str) -> str:
    """Returns the content of a box. Raises ValueError without a box."""
    answer = extract_answer(s)
    if answer is None:
        raise ValueError(f"s must have a box such as \\boxed{{5}}, got {s!r:.80}; pass the text of the box")
    return answer


def expected_answer(label: object) -> str:
    """Returns the answer in a label: its boxed part, the part after GSM8K's `####`, or the whole label.

    A number is written without an exponent. Raises ValueError if the label has no answer, because its reward could
    never be above 0.
    """
    if isinstance(label, numbers.Real) and not isinstance(label, bool):
        return _number_text(label)
    if not isinstance(label, str):
        raise ValueError(f"label must be text or a number, got {label!r:.80}; check --label-key")
    answer = extract_answer(label) if _BOX.search(label) else label.rpartition("####")[2].strip()
    if not answer or answer.lower() == "nan":
        raise ValueError(f"label must hold an answer, got {label!r:.80}; check --label-key")
    return answer


def _number_text(number: numbers.Real) -> str:
    """Returns the shortest text of a number without an exponent: 0.00001 for 1e-05."""
    if not math.isfinite(number):
        raise ValueError(f"label must be a finite number, got {number!r}; check --label-key")
    if isinstance(number, int) or float(number).is_integer():
        return str(number if isinstance(number, int) else int(float(number)))
    return format(Decimal(repr(float(number))), "f")


def without_special_text(text: str) -> str:
    """Removes special tokens at both ends of `text`, recognized by their form, and `<|...|>` inside.

    This serves texts whose tokenizer is unknown. `async_rm` has already removed tokens by their ids.
    """
    return _ends_off(_SPECIAL_INSIDE.sub("\n", _ends_off(text)))


def _ends_off(text: str) -> str:
    """Removes special tokens at both ends of `text`, recognized by their form, and the spaces around them."""
    end = len(text)
    while (token := _special_before(text, _spaces_before(text, end))) is not None:
        end = token
    if end < len(text):
        end = _spaces_before(text, end)
    start, after = 0, _spaces_after(text, 0, end)
    while match := _SPECIAL.match(text, after, min(end, after + _LONGEST_SPECIAL)):
        start = after = _spaces_after(text, match.end(), end)
    return text[start:end]


def _special_before(text: str, end: int) -> int | None:
    """Returns the start of the special token that ends at `end`, or None. No token contains its own bracket inside."""
    first = max(0, end - _LONGEST_SPECIAL)
    if text[end - 1 : end] == ">":
        start = text.rfind("<", first, end)
    elif text[end - 1 : end] in ("]", "["):
        start = max(text.rfind(bracket, first, end - 1) for bracket in "[]")
    else:
        return None
    return start if start >= 0 and _SPECIAL.fullmatch(text, start, end) else None


def _spaces_before(text: str, end: int) -> int:
    while end and text[end - 1].isspace():
        end -= 1
    return end


def _spaces_after(text: str, start: int, end: int) -> int:
    match = _SPACES.match(text, start, end)
    return match.end() if match else start
