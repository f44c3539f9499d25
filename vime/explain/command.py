"""`vime explain WORDS`: finds the error messages of vime, and the symptoms of docs/troubleshooting.md, that fit the
words.

Owns the search, which needs no network. The words may be a part of a message, a whole line with its values, or
misspelled.
"""

from __future__ import annotations

import difflib
import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence

from vime.explain.messages import ErrorMessage, entries, split_words

SHOWN = 5
ENOUGH = 0.5
"""A message fits if its words cover this share of the weight of the given words."""
UNKNOWN = 1.5
"""Weight of a word that no message has. A word in half of the messages has 1.1, a word in one message 6.4."""
USAGE = """usage: vime explain WORDS      what an error message means, and what to do

WORDS are a part of the message or the whole line, also one of CUDA, NCCL or the system. The exit status is 1 if nothing
fits."""


def nearest_words(words: Iterable[str], known: Iterable[str]) -> dict[str, dict[str, float]]:
    """Maps each given word to the known words that it may mean, with their similarity (1 is equal)."""
    known = list(known)
    found: dict[str, dict[str, float]] = {}
    for word in words:
        parts = {other: 0.8 for other in known if len(word) > 3 and word in other}
        if word in known:
            near = {word: 1.0}
        else:
            close = difflib.get_close_matches(word, known, n=5, cutoff=0.8)
            near = {other: difflib.SequenceMatcher(None, word, other).ratio() ** 2 for other in close}
        found[word] = parts | near
    return found


def search(text: str, messages: Sequence[ErrorMessage]) -> list[ErrorMessage]:
    """Returns the messages that fit, best first.

    A message that the text holds as a whole comes before all others. A symptom whose printed part the text holds comes
    next.
    """
    whole = sorted((m for m in messages if m.constant >= 8 and m.is_in(text)), key=lambda m: -m.constant)
    seen = [m for m in messages if m not in whole and m.is_quoted_in(text)]
    if whole:
        return [*whole, *seen]
    return seen + [m for m in _by_words(text, messages) if m not in seen]


def _by_words(text: str, messages: Sequence[ErrorMessage]) -> list[ErrorMessage]:
    """Returns the messages that have most of the words of the text, best first."""
    query = list(dict.fromkeys(split_words(text)))
    count = Counter(word for m in messages for word in m.words)
    near = nearest_words(query, count)
    # A word in few messages has a high weight. A word in no message is often a value or the user's own word.
    weight = {w: math.log(1 + len(messages) / count[w]) if count[w] else UNKNOWN for w in query}
    total = sum(weight.values())

    def score(m: ErrorMessage) -> float:
        hits = (
            weight[w] * max((share for other, share in near[w].items() if other in m.words), default=0.0)
            for w in query
        )
        return sum(hits) / total

    scored = sorted(((score(m), m) for m in messages), key=lambda pair: (-pair[0], pair[1].constant))
    return [m for value, m in scored if value >= ENOUGH and value >= scored[0][0] - 0.15]


def shown(entry: ErrorMessage) -> str:
    """Formats a message with its remedy, for a terminal."""
    remedy = textwrap.fill(entry.remedy, 100, initial_indent="    ", subsequent_indent="    ")
    where = "from" if entry.path.endswith(".md") else "raised in"
    return f"{entry.rule}\n{remedy}\n    {where} {entry.path}"


def main(argv: Sequence[str]) -> int:
    """Prints the messages that fit. Returns 1 if nothing fits. Raises ValueError without words."""
    if list(argv) in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    text = " ".join(argv)
    if not split_words(text):
        raise ValueError("explain must have words of a message, got none; give a part of the message")
    found = search(text, entries())
    if not found:
        print(f"no message fits {text!r}; try fewer words, such as a flag")
        return 1
    print("\n\n".join(shown(entry) for entry in found[:SHOWN]))
    if len(found) > SHOWN:
        print(f"\n{len(found) - SHOWN} more fit; give more words")
    return 0
