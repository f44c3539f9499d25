"""This module decides whether two mathematical answers are equal. It owns the order of the comparisons and the form
that an answer must have.

Words are compared as words, and numbers as exact values. Lists, pairs, sets and equations are compared part by part.
Only other expressions are sent to SymPy (math_processes), which multiplies letters and has a separate tolerance.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import os
import re
from fractions import Fraction

from slime.rollout.rewards.math_processes import CPU_S, Compared, MathChecker, TooMuch, Work
from slime.rollout.rewards.notation import FUNCTIONS, tidy
from slime.rollout.rewards.quantity import LONGEST, TOLERANCE, Quantity, parse_unit, quantity

logger = logging.getLogger(__name__)

WORKERS = max(2, min(16, (os.cpu_count() or 1) // 4))
"""Number of processes that run SymPy."""
_MOST_PARTS = 64
"""Maximum number of entries in a list. A longer list is compared as text, because a set of n entries needs n * n
comparisons."""
_LONGEST_EXPRESSION, _DEEPEST = 400, 12
"""Maximum length in characters, and maximum depth of brackets, of an expression for SymPy's reader. It takes 0.3 s for
that length, 0.5 s for that depth, and 5 s for a depth of 40. A longer or deeper label raises the limits for its
answers: to twice its length, and to its depth."""
_MOST_LAYERS = 20
"""Maximum number of outer brackets that are removed, because each layer needs another pass over the answer."""

_WORD = re.compile(r"\\text\{([^{}]*)\}")
_LETTERS = re.compile(r"[^\W\d_]+(?:[\s\-'./&]+[^\W\d_]+)*\.?")
_COLOR = re.compile(r"\\(?:text)?color\{[^{}]*\}|\\(?:boxed|fbox|ensuremath|underline)\s*(?=\{)")
_NOON = re.compile(r"(?<![A-Za-z])([ap])\.\s?m(?![A-Za-z])\.?", re.IGNORECASE)
_ARTICLE = re.compile(r"^(?:an?|the)\s+(?=\S{2})", re.IGNORECASE)
_OPENING, _CLOSING = "([{", ")]}"
_BRACKETS = {"()", "[]", "(]", "[)", "{}", "<>"}
_RELATION = re.compile(
    r"\\(?:le|ge|ne|in|equiv|to|approx|mid|pmod|bmod|mod|sim|subset|subseteq)(?![A-Za-z])|[=<>:]"
)
_FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "=": "=", "\\ne": "\\ne"}
_NAME = re.compile(r"\\?[A-Za-z]+'?(?:_(?:\w|\{[^{}]*\}))?(?:\s*\([A-Za-z, ]*\))?|\\text\{[^{}]*\}")
_SEPARATOR = re.compile(r"[,;]|\\text\{\s*(?:and|or|,\s*and|,\s*or)\s*\}|(?<![A-Za-z])(?:and|or)(?![A-Za-z])")
_NEIGHBOURS = re.compile(r"[0-9.]\s+[0-9]|[0-9]\s*\\text\{[^{}]*\}\s*[0-9]")
_UNIT = r"(?:\\text\{[^{}]*\}(?:\s*\^\s*\{?-?[0-9]\}?)?|\\degree\s*[CF]?|\\%)"
_FIRST_UNIT, _UNITS = re.compile(_UNIT), re.compile(_UNIT + "+")
_MIXED = re.compile(r"(?<![0-9.}])([0-9]+)\s*(\\frac\{([0-9]+)\}\{([0-9]+)\})")
_DECORATED = re.compile(
    r"\\(?:over(?:line|rightarrow|leftrightarrow)|bar|vec|hat|widehat|tilde|dot)\s*\{?\s*[A-Za-z]+\s*\}?'*"
)
_TRANSPOSED = re.compile(r"\^\s*\{?\s*(T|\\top|\\dagger|\\cdot|\\prime)\s*\}?(?![A-Za-z])")
_UNKNOWN = re.compile(r"(?<![\\A-Za-z{_])(?:I(?![A-Za-z])|[A-Za-z]'+|[A-Z]{2,}|[A-Za-z]{3,})(?![A-Za-z])")
"""Letters and words that SymPy's reader would read as i, multiply, or read without their prime."""
_PLAIN = ("whole", "decimal")
_COMPUTED = re.compile(r"\\(?:frac|sqrt|cdot|times|binom)|[0-9)}][-+*/^!]")


def same_answer(answer: str, gold: str) -> bool:
    """Returns True if `answer` equals `gold` as mathematics and has the form of `gold`.

    Any thread may call this. The call blocks up to the limits of `math_processes`, so do not call it on the event loop.
    Numbers are compared exactly, and a decimal with an expression to a relative 1e-6. The result is deterministic,
    because the limit is CPU time, not wall time.
    """
    if not answer.strip() or not gold.strip():
        return False
    first, second = (_undressed(tidy(text)) for text in (answer, gold))
    try:
        return bool(first and second) and _same(first, second, Work())
    except TooMuch as error:
        logger.warning("answer %.80r counts as different from %.80r: the comparison %s", answer, gold, error)
        return False


def _undressed(text: str) -> str:
    """Removes colours, boxes, and outer braces or parentheses around a single entry."""
    text = _NOON.sub(r"\1m", _COLOR.sub("", text).strip())
    if (inner := _WORD.fullmatch(text)) is not None:
        text = inner[1].strip()
    for _ in range(_MOST_LAYERS if len(text) <= LONGEST else 0):
        if text[:1] + text[-1:] not in ("{}", "()") or not _outer(text) or split(text[1:-1], _SEPARATOR)[1:]:
            break
        text = text[1:-1].strip()
    return text


def _same(answer: str, gold: str, work: Work) -> bool:
    with work.one_more():
        return _same_text(answer, gold) or _same_parts(answer, gold, work)


def _same_text(answer: str, gold: str) -> bool:
    """Returns True if both texts are equal when spaces, text commands and, for words, letter case are ignored."""
    if "".join(answer.split()) == "".join(gold.split()) and (
        " " not in answer or _spaced(answer) == _spaced(gold)
    ):
        return True
    texts = [_WORD.sub(r" \1 ", text).strip(" .").split() for text in (answer, gold)]
    if texts[0] == texts[1]:
        return True
    worded = re.search(r"(?<![\\A-Za-z])[A-Za-z]{3}", gold) is not None
    return worded and str(texts[0]).casefold() == str(texts[1]).casefold()


def _same_parts(answer: str, gold: str, work: Work) -> bool:
    if max(len(answer), len(gold)) > LONGEST:
        return False
    words = _words(answer), _words(gold)
    if None not in words:
        return words[0] == words[1] or "".join(words[0] or ()) == "".join(words[1] or ())
    if any(words) and max(len(word) for each in words for word in each or ()) > 2:
        return False
    numbers = quantity(answer), quantity(gold)
    if numbers[0] is not None and numbers[1] is not None:
        return _same_quantity(numbers[0], numbers[1])
    for compare in (_same_branches, _same_entries, _same_relation):
        if (verdict := compare(answer, gold, work)) is not None:
            return verdict
    return _same_expression(answer, gold, work)


def _spaced(text: str) -> str:
    """Removes all spaces except those between two digits."""
    return re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", text)


def _words(text: str) -> tuple[str, ...] | None:
    """Returns the words of a text that contains only words, in lower case, or None."""
    if "\\" in text:
        text = _WORD.sub(r" \1 ", text)
    text = _ARTICLE.sub("", text.strip(' ()[]".'))
    text = text.replace("\\&", "&").replace("\\ ", " ")
    if len(text) > 3:
        text = text.rstrip("!")
    if not _LETTERS.fullmatch(text) or text in FUNCTIONS or len(split(text, _SEPARATOR)) > 1:
        return None
    return tuple(re.findall(r"[^\W\d_]+", text.casefold()))


def _same_quantity(answer: Quantity, gold: Quantity) -> bool:
    """Returns True if two quantities have the same base, unit and exact value. Two fractions must have the same
    numerator and denominator. A whole number must be written as a whole number. A decimal may be the first six digits
    of a fraction."""
    if answer.base != gold.base:
        return False
    first, second = answer.value, gold.value
    if answer.unit and gold.unit:
        if answer.known and gold.known:
            if answer.unit != gold.unit:
                return False
            first, second = first * answer.size, second * gold.size
        elif not set(answer.unit) & set(gold.unit):
            return False
    elif (answer.unit or gold.unit) and (answer.percent or gold.percent):
        return False
    if answer.percent != gold.percent:
        percent, other = (first, second) if answer.percent else (second, first)
        return other in (percent, percent / 100)
    forms = answer.form, gold.form
    if forms == ("fraction", "fraction") and answer.parts != gold.parts:
        return False
    if "whole" in forms and forms[0] != forms[1] and "decimal" not in forms:
        return False
    return first == second or ("decimal" in forms and not set(forms) <= set(_PLAIN) and _close(first, second))


def _close(first: Fraction, second: Fraction) -> bool:
    return abs(first - second) <= TOLERANCE * max(abs(first), abs(second))


def _outer(text: str) -> str:
    """Returns the kind of the brackets around all of `text`, such as "(]" or "{}" for a set, or ""."""
    for opening, closing in (("\\{", "\\}"), ("\\langle", "\\rangle")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening + closing):
            return "{}" if opening == "\\{" else "<>"
    if text[:1] not in _OPENING or text[-1:] not in _CLOSING or len(text) < 2:
        return ""
    depth = 0
    for position, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        if depth == 0 and position < len(text) - 1:
            return ""
    return text[0] + text[-1]


def split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Splits `text` at the separators outside brackets and commands. The result includes the separators."""
    parts, depth, start = [], 0, 0
    positions = {match.start(): match for match in separator.finditer(text)}
    position = 0
    while position < len(text):
        depth += (text[position] in _OPENING) - (text[position] in _CLOSING)
        match = positions.get(position)
        if match is not None and depth == 0:
            parts += [text[start:position].strip(), match[0].strip()]
            start = position = match.end()
        else:
            position += 1
    return [*parts, text[start:].strip()]


def _entries(text: str) -> tuple[str, list[str]] | None:
    """Returns (kind of brackets, entries) of a pair, interval, set or list, or None."""
    kind = _outer(text)
    inner = text
    if kind:
        width = {"{}": (2, 2), "<>": (7, 7)}.get(kind, (1, 1)) if text.startswith("\\") else (1, 1)
        inner = text[width[0] : -width[1]]
        if kind == "{}" and not text.startswith("\\"):
            kind = ""
    parts = split(inner.strip(), _SEPARATOR)
    if len(parts) == 1 and (kind != "{}"):
        return None
    return kind, [part for part in parts[::2] if part]


def _same_branches(answer: str, gold: str, work: Work) -> bool | None:
    """Compares unions, in any order, and the two values of a plus-minus sign."""
    for command in ("\\cup", "\\lor", "\\vee"):
        if command in answer or command in gold:
            pattern = re.compile(re.escape(command) + "(?![A-Za-z])")
            answers, golds = (split(text, pattern)[::2] for text in (answer, gold))
            return _matched(answers, golds, work) if len(answers) > 1 and len(golds) > 1 else None
    if "\\pm" in answer or "\\pm" in gold:
        both = [[text.replace("\\pm", sign).replace("\\mp", other) for sign, other in ("+-", "-+")] if "\\pm" in text
                else (_entries(text) or ("", [text]))[1] for text in (answer, gold)]  # fmt: skip
        first, second = ([part.strip().removeprefix("+").strip() for part in parts] for parts in both)
        return _matched(first, second, work)
    return None


def _same_entries(answer: str, gold: str, work: Work) -> bool | None:
    """Compares pairs, intervals and vectors by entry, in brackets of the same kind; sets and lists in any order."""
    first, second = _entries(answer), _entries(gold)
    if first is None or second is None:
        only = first or second
        if only is None:
            return None
        if only[0] in ("{}", "") and len(only[1]) == 1:
            return _same(only[1][0], gold, work) if first else _same(answer, only[1][0], work)
        return None if _RELATION.search(answer + gold) and only[0] else False
    (kind, answers), (wanted, golds) = first, second
    unordered = {"{}", ""}
    if kind != wanted and not {kind, wanted} <= unordered:
        return False
    if len(answers) != len(golds) or not answers or len(answers) > _MOST_PARTS:
        return False
    # A list of words may be an order ("B, C, A"). A list of numbers holds the solutions of an equation.
    if kind in unordered and (kind == wanted == "{}" or not all(_words(entry) for entry in golds)):
        return _matched(answers, golds, work)
    return all(_same(_undressed(a), _undressed(g), work) for a, g in zip(answers, golds, strict=True))


def _matched(answers: list[str], golds: list[str], work: Work) -> bool:
    """Returns True if each answer equals a different gold."""
    left = [_undressed(gold) for gold in golds]
    for answer in answers:
        found = next((gold for gold in left if _same(_undressed(answer), gold, work)), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def _same_relation(answer: str, gold: str, work: Work) -> bool | None:
    """Compares equations and inequalities, side with side. `x=5` means 5, and `x \\in A` means A."""
    sides, wanted = split(answer, _RELATION), split(gold, _RELATION)
    if len(sides) == 1 and len(wanted) == 1:
        return None
    if len(sides) == 1 or len(wanted) == 1:
        long, single = (sides, gold) if len(wanted) == 1 else (wanted, answer)
        computed = len(wanted) == 1 and not any(re.search("[A-Za-z]", side) for side in long[:-1:2])
        if set(long[1::2]) <= {"=", "\\in"} and (_NAME.fullmatch(long[0]) or computed):
            last = _undressed(long[-1])
            return _same(last, single, work) if len(wanted) == 1 else _same(single, last, work)
        return None if set(long[1::2]) <= {"<", ">", "\\le", "\\ge"} and _outer(single) else False
    if len(sides) == len(wanted):
        signs = sides[1::2], wanted[1::2]
        flipped = [_FLIPPED.get(sign) for sign in signs[0]][::-1]
        for order, own in ((sides[::2], signs[0]), (sides[::-2], flipped)):
            if own == signs[1] and all(
                _same(_undressed(a), _undressed(g), work) for a, g in zip(order, wanted[::2], strict=True)
            ):
                return True
    if {*sides[1::2], *wanted[1::2]} <= {"=", "<", ">", "\\le", "\\ge", "\\ne"}:
        alike = len(sides) == len(wanted) == 3 and sides[:2] == wanted[:2]
        if alike and _NAME.fullmatch(sides[0]):
            return False  # the values were compared above
        return _same_value(answer, gold, False, work)
    return False


def _same_expression(answer: str, gold: str, work: Work) -> bool:
    """Compares other expressions: unit and form must be the same, and SymPy must find the values equal."""
    (answer, unit), (gold, wanted) = _unit_split(answer), _unit_split(gold)
    if unit and wanted and unit != wanted:
        return False
    if _NEIGHBOURS.search(answer) or _NEIGHBOURS.search(gold):
        return False
    numbers = quantity(answer), quantity(gold)
    if (unit or wanted) and numbers[0] is not None and numbers[1] is not None:
        return _same_quantity(numbers[0], numbers[1])
    for number, other in (numbers, numbers[::-1]):
        text = gold if number is numbers[0] else answer
        if (
            number is not None
            and other is None
            and number.form == "whole"
            and _COMPUTED.search(text.replace(" ", ""))
        ):
            return False
    if any(number is not None and number.base != 10 for number in numbers):
        return False
    decimals = any(number is not None and number.form == "decimal" for number in numbers)
    return _same_value(answer, gold, decimals, work)


def _unit_split(text: str) -> tuple[str, tuple[str, ...]]:
    """Returns the text before the units at its end, and the units."""
    last = [None, *_UNITS.finditer(text)][-1]
    if last is None or last.end() < len(text):
        return text, ()
    start = last.start()
    if start == 0 and (first := _FIRST_UNIT.match(text)) is not None:  # a value must precede the units
        start = first.end()
    unit = text[start:]
    if not unit or (unit == "\\degree" and re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text)):
        return text, ()
    found = parse_unit(unit) if unit != "\\%" else None
    return (text, ()) if found is None else (text[:start].strip(), found[0])


def _same_value(answer: str, gold: str, decimal: bool, work: Work) -> bool:
    if len(answer) > max(_LONGEST_EXPRESSION, 2 * len(gold)) or _depth(answer) > max(_DEEPEST, _depth(gold)):
        return False
    return work.result(_ask(expression(gold), expression(answer), decimal))


def _depth(text: str) -> int:
    """Returns the depth of nested brackets."""
    steps = ((character in _OPENING) - (character in _CLOSING) for character in text)
    return max(itertools.accumulate(steps), default=0)


def expression(text: str) -> str:
    """Rewrites `text` for SymPy's reader. Decimals become exact fractions. Each word, and each letter with a prime,
    becomes a separate symbol, because the reader would multiply the letters or drop the prime."""
    text = _MIXED.sub(lambda m: f"({m[1]}+{m[2]})" if int(m[3]) < int(m[4]) else m[0], text)
    text = re.sub(r"((?<![0-9.])[0-9.]++)\s*\\degree(?![A-Za-z])\s*", r"(\1\\cdot\\frac{\\pi}{180})", text)
    text = _DECORATED.sub(lambda m: _symbol(m[0]), text)
    text = re.sub(r"\\text\{([^{}]*)\}", lambda m: _symbol(m[1]), text)
    text = _TRANSPOSED.sub(lambda m: f"^{{{_symbol(m[1])}}}", text)
    text = _UNKNOWN.sub(lambda m: _symbol(m[0]), text)
    text = re.sub(r"([0-9])[eE]([-+]?[0-9]+)(?![0-9.])", r"\1\\times 10^{\2}", text)
    text = re.sub(
        r"(?<=[0-9)])\s*(?=\()|(?<=\))\s*(?=[0-9])", r"\\cdot ", text
    )  # SymPy's reader reads 2(3) as 2 + 3
    return re.sub(r"((?:(?<![0-9])[0-9]++)?)\.([0-9]+)", _exact, text)


def _symbol(word: str) -> str:
    code = "".join(f"{ord(character):04d}" for character in " ".join(word.split()))
    return f" w_{{{code}}} "


def _exact(match: re.Match[str]) -> str:
    return f"\\frac{{{int(match[1] + match[2])}}}{{{10 ** len(match[2])}}}"


@functools.lru_cache(maxsize=4096)  # the samples of a group often give the same wrong answers
def _ask(gold: str, answer: str, decimal: bool) -> Compared:
    return _checker().compare(gold, answer, decimal=decimal)


@functools.cache
def _checker() -> MathChecker:
    checker = MathChecker(workers=WORKERS, cpu_limit_s=CPU_S)
    atexit.register(checker.close)
    return checker
