"""The `gpqa` reward: the letter of a multiple-choice answer (format of GPQA, Rein et al., 2023).

`metadata` may hold `choices` (a list, or a dict letter -> text), `correct_letter`, `valid_letters`, and
`correct_answer` (the text of the right choice).
"""

from __future__ import annotations

import re
import string
from collections.abc import Collection
from typing import Any

from slime.rollout.rewards.text import after_thinking, extract_answer

_OPEN = r"[\s*_:(\[$\"']*"
# Phrases that state a letter as the answer, most explicit first. The last match of a phrase counts.
_STATED = [
    re.compile(
        rf"(?i:answer|option|choice|choose|select|pick)(?i:{_OPEN}(?:is|would be|must be|option|choice))*"
        rf"{_OPEN}([A-Z])(?![A-Za-z'])"
    ),
    re.compile(r"(?<![A-Za-z])([A-Z])[)\]*.\s]*(?i:is)\s+(?i:the\s+)?(?i:correct|right|best)"),
    re.compile(r"^[ \t*_(\[$]*([A-Z])[)\]*_$.:]*[ \t]*$", re.MULTILINE),
]
# Last resort: a single capital letter. "A" before a word is the article, and "I" the pronoun.
_ALONE = re.compile(r"(?<![A-Za-z'])(?![AI]\s+[a-z])([A-Z])(?![A-Za-z'])")
_BOX_DRESS = re.compile(r"\\(?:text|textbf|mathrm|mathbf)|[{}().\s$]")


def _words(text: Any) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", str(text).lower()))


def chosen_letter(response: str, valid_letters: Collection[str]) -> str | None:
    """The letter that the response gives after its thinking, or None.

    Searched in this order: a boxed letter, a stated letter ("the answer is (C)"), a letter alone on a line, the
    last single letter.
    """
    text = after_thinking(response)
    boxed = _BOX_DRESS.sub("", extract_answer(text) or "")
    if boxed in valid_letters:
        return boxed
    for pattern in (*_STATED, _ALONE):
        letters: list[str] = [letter for letter in pattern.findall(text) if letter in valid_letters]
        if letters:
            return letters[-1]
    return None


def _options(metadata: dict[str, Any]) -> dict[str, str]:
    """Letter -> text of the choice. Without choices in the metadata: letters A to J with empty texts."""
    choices = metadata.get("choices") or []
    letters = [str(letter).strip().upper() for letter in metadata.get("valid_letters") or []]
    if isinstance(choices, dict):
        letters = letters or [str(key).strip().upper() for key in choices]
        choices = list(choices.values())
    letters = letters or list(string.ascii_uppercase[: len(choices) or 10])
    texts = [str(choice) for choice in choices] or [""] * len(letters)
    if len(texts) != len(letters):
        raise ValueError(
            f"metadata choices must have one entry per letter, got {len(texts)} choices for {letters}"
        )
    return dict(zip(letters, texts, strict=True))


def _correct_letter(label: Any, metadata: dict[str, Any], options: dict[str, str]) -> str | None:
    """The right letter: `correct_letter`, or the choice that the label gives as letter, index or text, or None."""
    given = metadata.get("correct_letter")
    if isinstance(given, str) and given.strip().upper() in options:
        return given.strip().upper()
    if isinstance(label, int | float) and label in range(len(options)):
        return list(options)[int(label)]
    text = str(label if label is not None else metadata.get("correct_answer", ""))
    letter = text.strip("(). ").upper()
    if letter in options:
        return letter
    same_text = (letter for letter, choice in options.items() if choice and _words(choice) == _words(text))
    return next(same_text, None)


def compute_gpqa_reward(response: str, label: Any, metadata: dict[str, Any] | None = None) -> float:
    """1.0 for the right letter, 0.0 for another letter.

    A response without a letter gets 1.0 if it contains the text of the right choice and of no other choice.
    ValueError if neither the label nor the metadata gives the right choice.
    """
    metadata = metadata or {}
    options = _options(metadata)
    correct = _correct_letter(label, metadata, options)
    letter = chosen_letter(response, options)
    if correct is not None and letter is not None:
        return float(letter == correct)
    text = options[correct] if correct is not None else label
    right = _words(text or metadata.get("correct_answer") or "")
    if not right and correct is None:
        raise ValueError(
            f"label must name the right choice (a letter, its index, or its text), got {label!r}; "
            "check --label-key, or set correct_letter in the metadata"
        )
    said = f" {_words(after_thinking(response))} "
    wrong = [_words(choice) for choice in options.values() if choice and _words(choice) != right]
    return float(bool(right) and f" {right} " in said and not any(f" {choice} " in said for choice in wrong))


def gpqa_reward(response: str, label: Any, metadata: dict[str, Any]) -> float:
    """1.0 or 0.0."""
    return compute_gpqa_reward(response, label, metadata)
