"""The error of a flag or another name that a user gives, as a record. Its text is built from its fields."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Self

_NO_VALUE = "\0"
"""Marks an error that has no value to show."""


class FlagError(ValueError):
    """The error "<flag> must <rule>, got <got>; <advice>".

    `flag` is the wrong flag as typed, several flags, or another name, such as an entry of a file. `flags` are the flags
    in `flag`, `rule` and `advice`; `got` is a value of the user, in which no flag counts. `prefix` comes before the
    text, such as the file that sets the flag.

    Example:
        >>> error = FlagError("--lr", "be above --min-lr", 0, "raise it")
        >>> str(error), error.advice, sorted(error.flags)
        ('--lr must be above --min-lr, got 0; raise it', 'raise it', ['--lr', '--min-lr'])
    """

    def __init__(
        self, flag: object, rule: object, got: object = _NO_VALUE, advice: object = "", prefix: str = ""
    ) -> None:
        self.flag, self.rule, self.got, self.advice = str(flag), str(rule), str(got), str(advice)
        self.prefix = prefix
        super().__init__(self.prefix + self._text())

    @property
    def finding(self) -> str:
        """Returns the text without prefix and advice."""
        got = "" if self.got == _NO_VALUE else f", got {self.got}"
        return f"{self.flag} must {self.rule}{got}"

    @property
    def flags(self) -> frozenset[str]:
        return frozenset(_FLAG.findall(f"{self.flag} {self.rule} {self.advice}"))

    def after(self, prefix: str) -> Self:
        """Returns the same error with `prefix` before its text."""
        return type(self)(self.flag, self.rule, self.got, self.advice, prefix + self.prefix)

    def renamed(self, spelling: Callable[[str], str]) -> Self:
        """Returns the same error with each flag as `spelling` returns it. The user's value stays unchanged."""
        flag, rule, advice = (replace_flags(part, spelling) for part in (self.flag, self.rule, self.advice))
        return type(self)(flag, rule, self.got, advice, self.prefix)

    def _text(self) -> str:
        return f"{self.finding}; {self.advice}" if self.advice else self.finding

    def __reduce__(self) -> tuple[type[Self], tuple[str, ...]]:
        return type(self), (self.flag, self.rule, self.got, self.advice, self.prefix)


class StatedError(FlagError):
    """The error "<flag> <rule>, got <got>; <advice>", whose `rule` is a statement, such as "is missing"."""

    @property
    def finding(self) -> str:
        return f"{self.flag} {self.rule}, got {self.got}"


class UnknownFlag(FlagError):
    """The error "<flag> is not <rule>" with the nearest known name in `advice`, as `nearest` returns it."""

    @property
    def finding(self) -> str:
        return f"{self.flag} is not {self.rule}"

    def _text(self) -> str:
        return self.finding + self.advice


_FLAG = re.compile(r"--[a-z][\w-]*")


def replace_flags(text: str, spelled: Callable[[str], str]) -> str:
    """Returns a text of this project with each flag as `spelled` returns it."""
    return _FLAG.sub(lambda found: spelled(found[0]), text)
