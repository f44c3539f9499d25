"""Finds the known name that a wrong name was probably meant for."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches

TYPO = 0.9
"""Lowest difflib ratio of a spelling mistake. Such a name comes before a longer one with the same words."""
NEAR = 0.8
"""Lowest difflib ratio for a suggestion: --lrr is near --lr (0.8), --fused-rope is not near --use-opd (0.7)."""
SHARED = 0.75
"""Lowest share of common words: --rollout-response-len has 3 of the 4 words of --rollout-max-response-len (6/7)."""
MOST = 2
"""Maximum number of equally similar names that are suggested. More names would show that none is meant."""


def nearest(name: str, known: Iterable[str], *, prefix: str = "--", words: bool = True) -> str:
    """Returns the known name closest to `name`, as the end of an error message. The text is empty if no name is
    similar.

    `prefix` is shown in front of the name but not compared, because a common prefix makes all names similar. Flags are
    shown with dashes inside, other names unchanged. Without `words`, only the spelling counts.
    """
    named = {k.replace("_", "-"): k for k in sorted(known)}
    found = _nearest(name.replace("_", "-"), list(named), words=words)
    shown = [f"{prefix}{near if prefix.startswith('--') else named[near]}" for near in found]
    return f"; did you mean {' or '.join(shown)}?" if shown else ""


def _nearest(name: str, known: list[str], *, words: bool) -> list[str]:
    """Prefers spelling mistakes, then names with the same beginning, then names with the same words."""
    if typo := get_close_matches(name, known, n=1, cutoff=TYPO):
        return typo
    whole = [each for each in known if not each.endswith("...")]
    if words and (found := _longer(name, whole) or _same_words(name, whole)):
        return found
    return get_close_matches(name, known, n=1, cutoff=NEAR)


def _longer(name: str, known: list[str]) -> list[str]:
    """Returns the shortest name that begins with `name`. If `name` is a single word, it must begin exactly one name."""
    if "-" in name:
        return sorted((each for each in known if each.startswith(name)), key=len)[:1]
    begins = [each for each in known if each.startswith(f"{name}-")]
    return begins if len(begins) == 1 else []


def _same_words(name: str, known: list[str]) -> list[str]:
    """Returns the names that share the most words with `name`, at least two."""
    mine = name.split("-")
    shares = dict[str, float]()
    for each in known:
        theirs = each.split("-")
        if len(mine) > 1 and len(theirs) > 1:
            shares[each] = 2 * _common(mine, theirs) / (len(mine) + len(theirs))
    best = max(shares.values(), default=0)
    found = [each for each, share in shares.items() if share == best]
    return found if best >= SHARED and len(found) <= MOST else []


def _common(mine: list[str], theirs: list[str]) -> int:
    """Returns the number of words that the two lists share. A word counts once."""
    left, number = list(theirs), 0
    for word in mine:
        if (same := next((each for each in left if _alike(word, each)), None)) is not None:
            left.remove(same)
            number += 1
    return number


def _alike(one: str, other: str) -> bool:
    """Returns True if two words are the same, an abbreviation of at least three letters, or a spelling mistake."""
    short, long = sorted((one, other), key=len)
    if short == long or (len(short) > 2 and long.startswith(short)):
        return True
    return len(short) > 3 and SequenceMatcher(None, one, other).ratio() >= NEAR
