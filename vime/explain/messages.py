"""The messages that `vime explain` searches: read from the code, and kept in vime/messages.json until the code changes.

A wheel has that file and no pages, and its file was made from its code. In a checkout, git ignores the file. Its key is
a hash of the sources, so the messages of older code are never shown.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vime.explain import sources
from vime.explain.sources import FILE, HOLE


@dataclass(frozen=True)
class ErrorMessage:
    """One message. `…` in `rule` is a placeholder for a value. `path` is the file that raises the message, or the page
    of a symptom."""

    rule: str
    remedy: str
    path: str
    quoted: Sequence[str] = ()
    """Texts that libraries print for a symptom."""

    @cached_property
    def words(self) -> frozenset[str]:
        return frozenset(split_words(f"{self.rule} {self.remedy}"))

    @cached_property
    def longest_part(self) -> str:
        """Returns the longest text between two values. A line without this text cannot hold the message."""
        return max(self.rule.split(HOLE), key=len)

    def is_in(self, text: str) -> bool:
        """Returns True if the text holds the whole message with its values."""
        return self.longest_part in text and self.pattern.search(text) is not None

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches a line of a log that holds this message with its values."""
        parts = (re.escape(part) for part in self.rule.split(HOLE))
        return re.compile(".+?".join(parts), re.DOTALL)

    @cached_property
    def phrases(self) -> tuple[str, ...]:
        """Returns the words of the printed parts that have several words, because one word is no proof."""
        return tuple(phrase for part in self.quoted if " " in (phrase := " ".join(split_words(part))))

    def is_quoted_in(self, text: str) -> bool:
        """Returns True if the text has a printed part of this symptom, or is such a part."""
        if not self.phrases:
            return False
        wanted = " ".join(split_words(text))
        return any(phrase in wanted or (" " in wanted and wanted in phrase) for phrase in self.phrases)

    @cached_property
    def constant(self) -> int:
        """Returns the number of letters that do not belong to values."""
        return len(re.findall(r"\w", self.rule))


def split_words(text: str) -> list[str]:
    """Splits a text into words in lower case. A flag is one word, with - or _ between its parts."""
    return [word.strip("-_").replace("_", "-") for word in re.findall(r"\w[\w-]*", text.lower())]


def entries(root: Path = sources.ROOT) -> list[ErrorMessage]:
    """Returns all messages of the code in `root`."""
    return [ErrorMessage(*row) for row in _content(root)["messages"]]


def _content(root: Path) -> dict[str, Any]:
    """Returns the content of FILE, which is made again if it is missing or if its key differs from the code's key."""
    cached = _read(root / FILE)
    if not sources.pages_exist(root):
        if cached is None:
            raise ValueError(
                f"{FILE} must be in an installed vime, got no such file in {root}; install vime again, or run "
                f"`vime explain` in a checkout that has {sources.NOTES} and {sources.SYMPTOMS}"
            )
        return cached
    if cached is None or cached["key"] != sources.key(root):
        print(
            "vime explain: reading the messages of the code, once for each change of the code",
            file=sys.stderr,
        )
        text = sources.page(root)
        _keep(root / FILE, text)
        cached = dict(json.loads(text))
    return cached


def _read(file: Path) -> dict[str, Any] | None:
    """Returns the content of the file, or None if it is missing or damaged."""
    try:
        cached = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return cached if isinstance(cached, dict) and {"key", "messages"} <= cached.keys() else None


def _keep(file: Path, text: str) -> None:
    """Writes the file atomically, because two commands may write it at the same time. If the user cannot write to the
    folder, the next command reads the code again."""
    part = file.with_name(f".{file.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)
