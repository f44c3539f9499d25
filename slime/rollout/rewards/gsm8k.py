"""The `gsm8k` reward compares the final number of the response with the label (Cobbe et al., 2021)."""

from __future__ import annotations

import re
from fractions import Fraction

from slime.rollout.rewards.notation import tidy
from slime.rollout.rewards.quantity import parse_unit, quantity
from slime.rollout.rewards.text import expected_answer, extract_answer, without_special_text
from slime.types import Metadata

# The number must follow the marker directly: "#### Step 2" is a Markdown heading, not an answer.
_MARKED = re.compile(r"####(?=[ \t*]*+(?:\\(?:boxed|text|frac|[({$])|[-+−–$€£¥₹({.\s])*+[0-9½¼¾⅐-⅞])([^\n]+)")
_TAIL_CHARS = 2000
"""Number of characters that are searched for a number, at the end of a response and after a "####"."""
# A run of characters that contains a number: 3/4, 3 1/2, 2^3, 12:30, 52_8. A minus after a digit is a subtraction.
_DIGITS = r"(?:\.?[0-9][0-9.]*)"
_RUN = re.compile(
    rf"(?:(?<![\w)\]}}.])-\s*)?(?:(?:\\dollar|[€£¥₹])\s*-?)?(?:{_DIGITS}|\\frac\{{-?[0-9]+\}}\{{[0-9]+\}})"
    rf"(?:[eE][-+]?[0-9]+(?![\w.])|\s*(?:[/:^_!]|\\frac|\\times\s*10\^)\s*\{{?-?{_DIGITS}?\}}?(?:\{{-?[0-9]+\}})*|\s+(?={_DIGITS}\s*/){_DIGITS})*"
)
_LAST_WORD = re.compile(r"((?<![A-Za-z])[A-Za-z]++|\\text\{[^{}]*\})\s*\^\s*\{?-?[0-9]\}?")
_SPACES = re.compile(r"\s+")
# If this character precedes a run, the run is part of a longer expression and not a separate number.
_JOINED = re.compile(r"[\w\\^_/]")
_GLUED = re.compile(r"[\^_/] ?\{?$")


def final_number(response: str) -> Fraction | None:
    """Returns the final number of `response`, or None.

    The final number follows the last "####". Without such a number, it is the number of the last box; without a box,
    the last number in the text. Thousands separators, units, `$` and `%` are dropped. A fraction has its value. 2^3 and
    12:30 are not numbers.
    """
    text = without_special_text(response)
    marked = _MARKED.findall(text)
    if marked:
        answer = marked[-1].strip(" \t*_`")[:_TAIL_CHARS]
        whole = _value(answer)
        return whole if whole is not None else _first(answer)
    boxed = extract_answer(text)
    if boxed is not None:
        return _value(boxed)
    return _last(text[-_TAIL_CHARS:])


def _value(text: str) -> Fraction | None:
    """Returns the value of a text that is one number, read after the last "=", or None."""
    found = quantity(tidy(text.strip(" \t*_`")).rpartition("=")[2])
    return None if found is None or found.base != 10 else found.value


def _first(text: str) -> Fraction | None:
    """Returns the number at the start of the text after "####", or None."""
    run = _RUN.match(tidy(text.strip(" \t*_`")))
    return None if run is None else _value(run[0].rstrip(".,"))


def _last(text: str) -> Fraction | None:
    lines = [tidy(_bold_off(line)) for line in text.splitlines()]
    for line in reversed(lines):
        line = _LAST_WORD.sub(
            lambda m: " " if parse_unit(f"\\text{{{m[1]}}}") and _is_unit(m[1]) else m[0], line
        )
        line = _SPACES.sub(" ", line)
        found = list(_RUN.finditer(line))
        runs = [run for run in found if not _JOINED.match(line, run.start() - 1, run.start())]
        glued = [run for run in found if _GLUED.search(line[max(0, run.start() - 3) : run.start()])]
        if glued and (not runs or glued[-1].start() >= runs[-1].start()):
            return None
        if runs:
            run, rest = runs[-1], line[runs[-1].end() :]
            scale = re.match(r"\s*(?:\\text\{)?\s*(\w+)", rest)
            magnitude = quantity(f"1 {scale[1]}") if scale else None
            value = _value(run[0].rstrip(".,:!"))
            return value if value is None or magnitude is None or magnitude.unit else value * magnitude.value
    return None


def _bold_off(line: str) -> str:
    return line.replace("**", " ").replace("__", " ")


def _is_unit(word: str) -> bool:
    found = parse_unit(word if word.startswith("\\") else f"\\text{{{word}}}")
    return found is not None and found[2] and (len(word) > 1 or word.startswith("\\"))


def label_number(label: object) -> Fraction:
    """Returns a label's number. Raises ValueError if the label is not exactly one number, with or without a unit."""
    text = expected_answer(label)
    found = quantity(tidy(text))
    if found is None or found.base != 10 or found.form not in ("whole", "decimal", "power"):
        raise ValueError(
            f"label must hold a number, and only one, for --rm-type gsm8k, got {label!r:.80}; write it in digits, as "
            "18 or as a solution that ends in #### 18, or choose --rm-type math"
        )
    return found.value


def gsm8k_reward(response: str, label: object, metadata: Metadata) -> float:
    """Returns 1.0 if response and label have the same final number, else 0.0.

    `label` is a number or a solution that ends in "#### 18". Raises ValueError if the label is not one number.
    """
    gold = label_number(label)
    return float(final_number(response) == gold)
