"""The `gpqa` reward compares the letter of a multiple-choice answer (format of GPQA, Rein et al., 2023).

`metadata` may hold `choices` (a list, or a dict letter -> text), `correct_letter`, `valid_letters`, and
`correct_answer` (the text of the right choice).
"""

from __future__ import annotations

import itertools
import re
import string
import unicodedata
from collections.abc import Collection

from slime.rollout.rewards.text import after_thinking, extract_answer, without_special_text
from slime.types import Metadata

DEFAULT_VALID_LETTERS = list(string.ascii_uppercase[:10])
"""The letters of a question whose metadata contain neither choices nor letters."""

# Characters that may surround a letter: brackets, emphasis, quotes, math mode, a text command.
_OPENING = r"(?:[\s*_(\[{$\"'`]|\\\(|\\(?:text|textbf|mathrm|mathbf|boxed)\{)*"
_CLOSING = r"(?:[)\]}*_$\"'`]|\\\))*"
_LETTER = re.compile(r"(?<![A-Za-z0-9'\\^])([A-Za-z])(?![A-Za-z0-9'^])")
_SMALL = re.compile(rf"[)\]]|{_CLOSING}[.,;:!?]*\s*(?:$|\n)|{_CLOSING}[.,;:!?]")
_ALONE = re.compile(r"^[ \t>*_()\[\]{}$.:\"'`]*+([A-Za-z])[ \t>*_()\[\]{}$.:\"'`]*+$", re.MULTILINE)
_MOST_LETTERS = 1000
"""Number of letters at the end of a response that are searched. Each letter takes up to 0.2 ms."""
_WORD_FOLLOWS = re.compile(r"\s+['a-z]")
# "A" before a word is the article and "I" the pronoun, unless the sentence continues after the letter.
_GOES_ON = re.compile(
    r"\s+(?:because|since|as|and|but|is|which|by|for|with|due|not|rather|while|given|so|or|from|based|where|in|on|at|"
    r"over|that|was|here|instead)\b"
)
_CLAUSE = re.compile(
    r"[.;!?](?=\s|$)|\n\s*\n|,?\s(?=but\b|while\b|although\b|though\b|it's\b|it is\b|however\b)",
    re.IGNORECASE,
)
_NOUN = (
    r"(?:(?<![a-z])(?:answer|option|choice|solution|response|selection)"
    r"(?:\s+(?:here|choice|letter|to (?:this|the) question))?|答案)"
)
_IS = r"(?:\bis|\bare|'s|\b(?:must|should|would|has to|will) be|:|=|：|是|为|->|→|[-–—](?=\s))"
_FILLER = (
    r"(?:[\s*_\"'`:)\]}]|\b(?:therefore|thus|clearly|then|indeed|still|actually|definitely|the|option|choice|answer"
    r"|correct|right|letter)\b)*"
)
# Phrases that state the letter after them as the answer.
_BEFORE = re.compile(
    rf"(?:{_NOUN}[\s*_\"'`)\]}}]*{_IS}{_FILLER}"
    rf"|\b(?:correct|right|best|true)(?:\s+(?:one|letter))?[\s*_]*{_IS}{_FILLER}"
    rf"|\b(?:choose|chose|select|pick|go with|going with|conclude|settle on|answer with|mark)\b[\s:]*{_FILLER}"
    rf"|\b(?:it|this|that)(?:'s|\s+is|\s+must be|\s+has to be|\s+should be)\b{_FILLER}"
    rf"|\b(?:but|correction|actually|rather|instead|no|wait|sorry|therefore|hence|so|thus)\b[,:;\s—–-]+{_FILLER}"
    rf"){_OPENING}$",
    re.IGNORECASE,
)
_AFTER = re.compile(
    rf"{_CLOSING}[.\s]*(?:is|seems|looks|must be)\s+(?:thus\s+|therefore\s+|clearly\s+|indeed\s+)?"
    r"(?:the\s+|my\s+)?(?:final\s+)?(?:correct|right|best|answer|true)(?!\s+only if)",
    re.IGNORECASE,
)
_DENIED = re.compile(
    r"\b(?:not|never|cannot|neither|nor|without|eliminate|exclude|reject|avoid|rule out|rules out|ruling out|instead of"
    r"|rather than|unlike|except|excluding)\b|n't\b",
    re.IGNORECASE,
)
_TAKEN_BACK = re.compile(
    rf"{_CLOSING}\s*(?:,?\s*but (?:that|this|it)(?:'s| is| was| would be) |(?:is|was|would be|seems|:)\s+)?"
    r"(?:also |clearly |definitely )?(?:not\b|wrong|incorrect|false|ruled out|eliminated|excluded|out\b|fails?\b|cannot"
    r"|(?:is|was|ca|does|wo|would)n't\b)",
    re.IGNORECASE,
)
_DOUBT = re.compile(
    r"\b(?:might|may|could|tempt\w*|people|students?|some|one|initially|first|if|whether|thought|suppose|were|mistake)\b",
    re.IGNORECASE,
)
_SECOND = re.compile(
    rf"{_CLOSING}\s*(?:/|or\b|and\b|,)\s*(?:option\s+|choice\s+|maybe\s+|possibly\s+)?{_OPENING}([A-Z])(?![A-Za-z'])"
)
_BOX_DRESS = re.compile(
    r"\\(?:text|textbf|mathrm|mathbf|mathit|textit|mbox)|(?i:option|choice|answer)(?![a-z])|[{}()\[\].:\s$*]"
)


def _words(text: object) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", str(text).lower()))


def chosen_letter(response: str | None, valid_letters: Collection[str]) -> str | None:
    """Returns the letter that the response gives after its thinking, or None. A response of None gives None.

    The search has this order: a boxed letter, the last stated letter ("the answer is (C)"), the last letter alone on a
    line, the last letter that is mentioned. A letter that the response denies ("not C", "C is wrong") does not count.
    If a response states two letters ("A or B"), neither counts as stated.
    """
    text = unicodedata.normalize("NFKC", after_thinking(without_special_text(response or ""))).replace(
        "’", "'"
    )
    boxed = _BOX_DRESS.sub("", extract_answer(text) or "").upper()
    if boxed and boxed in valid_letters:
        return boxed
    found: dict[str, tuple[int, str]] = {}
    alone = {match.start(1) for match in _ALONE.finditer(text)}
    letters = [match for match in _LETTER.finditer(text) if match[1].upper() in valid_letters]
    stated = (match for match in reversed(letters) if _may_be_answer(match, text))
    for match in itertools.islice(stated, _MOST_LETTERS):
        kind = _kind(match, text, match.start() in alone)
        if kind and kind not in found:
            found[kind] = match.end(), match[1].upper()
        if kind == "stated":
            break
    for kind in ("stated", "line", "mentioned"):
        if kind in found:
            index, letter = found[kind]
            other = _SECOND.match(text, index) if kind == "stated" else None
            return None if other and other[1] in valid_letters and other[1] != letter else letter
    return None


def _may_be_answer(match: re.Match[str], text: str) -> bool:
    """Returns True if the text after the letter allows that the letter is an answer and not a word."""
    after = text[match.end() : match.end() + 80]
    if _TAKEN_BACK.match(after):
        return False
    return not (match[1] in "AaI" and _WORD_FOLLOWS.match(after)) or _GOES_ON.match(after) is not None


def _kind(match: re.Match[str], text: str, alone: bool) -> str | None:
    """Returns "stated", "line" (the letter is alone on a line) or "mentioned", or None for a denied letter."""
    letter, after = match[1], text[match.end() : match.end() + 80]
    before = text[max(0, match.start() - 200) : match.start()]
    clause = _CLAUSE.split(before)[-1]
    cue = _BEFORE.search(before)
    if _DENIED.search(clause):
        return None
    if letter.islower() and not _SMALL.match(after):
        return None
    if (cue or _AFTER.match(after)) and not _DOUBT.search(clause):
        return "stated"
    if alone and (letter.isupper() or _SMALL.match(after)):
        return "line"
    return "mentioned" if letter.isupper() else None


def _options(metadata: Metadata) -> dict[str, str]:
    """Maps letters to the texts of the choices. Without choices in the metadata: letters A to J with empty texts."""
    choices = metadata.get("choices") or []
    letters = [str(letter).strip().upper() for letter in metadata.get("valid_letters") or []]
    if isinstance(choices, dict):
        letters = letters or [str(key).strip().upper() for key in choices]
        choices = list(choices.values())
    letters = letters or (list(string.ascii_uppercase[: len(choices)]) if choices else DEFAULT_VALID_LETTERS)
    texts = [str(choice) for choice in choices] or [""] * len(letters)
    if len(texts) != len(letters):
        raise ValueError(
            f"metadata choices must have one entry per letter, got {len(texts)} choices for {letters}"
        )
    return dict(zip(letters, texts, strict=True))


def _correct_letter(label: object, metadata: Metadata, options: dict[str, str]) -> str | None:
    """Returns `correct_letter`, or the choice that the label names by letter, index or text, or None."""
    stated = metadata.get("correct_letter")
    if isinstance(stated, str) and stated.strip().upper() in options:
        return stated.strip().upper()
    if isinstance(label, int | float) and not isinstance(label, bool) and label in range(len(options)):
        return list(options)[int(label)]
    text = str(label if label is not None else metadata.get("correct_answer", ""))
    letter = text.strip("(). ").upper()
    if letter in options:
        return letter
    same_text = (letter for letter, choice in options.items() if choice and _words(choice) == _words(text))
    return next(same_text, None)


def compute_gpqa_reward(response: str | None, label: object, metadata: Metadata | None = None) -> float:
    """Returns 1.0 for the right letter, 0.0 for another letter.

    A response without a letter gets 1.0 if it contains the text of the right choice and of no other choice. Raises
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
    answer_text = f" {_words(after_thinking(response or ''))} "
    wrong = [_words(choice) for choice in options.values() if choice and _words(choice) != right]
    return float(
        bool(right)
        and f" {right} " in answer_text
        and not any(f" {choice} " in answer_text for choice in wrong)
    )


def check_label(label: object, metadata: Metadata) -> None:
    """Raises ValueError unless the label or the metadata gives the right choice."""
    options = _options(metadata)
    stated = label if label is not None else metadata.get("correct_answer")
    known = metadata.get("choices") or metadata.get("valid_letters")
    named = isinstance(metadata.get("correct_letter"), str)
    typed = isinstance(stated, str | int | float) and not isinstance(stated, bool) and stated == stated
    usable = typed and _words(stated)
    if (_correct_letter(label, metadata, options) is None and (known or not usable)) or not (typed or named):
        raise ValueError(
            f"label must name the right choice (a letter, its index, or its text), got {label!r:.80} for "
            f"{list(options)}; check --label-key, or set correct_letter in the metadata"
        )


def gpqa_reward(response: str, label: object, metadata: Metadata) -> float:
    """Returns 1.0 or 0.0."""
    return compute_gpqa_reward(response, label, metadata)
