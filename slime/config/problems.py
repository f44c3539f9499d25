"""Reports all problems of a command line together. Owns how problems are collected, left out and printed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
_FLAG = re.compile(r"--[a-z][\w-]*")


def given(value: T | None) -> T:
    """Returns the value of a flag that an earlier rule requires. Raises TypeError without a value; see
    `Problems.check`."""
    if value is None:
        raise TypeError(
            "a rule must find the value that an earlier rule requires, got none; report this as a bug"
        )
    return value


class Problems:
    """Collects the ValueErrors of independent checks. `report` raises them together.

    Checks run in stages. A problem that names a flag of an earlier stage's problem is left out, because the earlier
    problem may be its cause. For example, an unknown `--rolout-batch-size` also leaves `--rollout-batch-size` without a
    value.
    """

    def __init__(self) -> None:
        self._found: list[str] = []
        self._named: set[str] = set()
        self._with_causes: set[str] = set()

    def check(
        self, rule: Callable[..., T], *args: object, origin: str = "", causes: Iterable[str] = ()
    ) -> T | None:
        """Returns the result of `rule(*args)`, or None if it raises ValueError.

        `origin`: the source of the value. `causes`: the flags whose later problems are left out if this rule finds a
        problem, instead of the flags that the problem names.
        """
        try:
            return rule(*args)
        except ValueError as error:
            texts = getattr(error, "problems", [str(error)])
            self.add(*texts, origin=origin)
            if causes:
                self._named.update(causes)
                self._with_causes.update(texts)
        except (TypeError, ArithmeticError, AssertionError):
            # An earlier problem left a value out or left it 0. Without an earlier problem, this is a bug.
            if not self._found:
                raise
        return None

    def add(self, *texts: str, origin: str = "") -> None:
        for text in texts:
            if not set(_FLAG.findall(text)) & self._named:
                self._found.append(f"{origin}: {text}" if origin else text)

    def next_stage(self) -> None:
        """Ends a stage: the problems so far may cause later problems with the same flags."""
        texts = (text for text in self._found if text not in self._with_causes)
        self._named.update(flag for text in texts for flag in _FLAG.findall(text))

    def report(self) -> None:
        """Raises ValueError if problems exist, with one problem per line. The text of a single problem stays
        unchanged."""
        texts = list(dict.fromkeys(self._found))
        if not texts:
            return
        lines = [f"  {number}. {text}" for number, text in enumerate(texts, start=1)]
        error = ValueError(texts[0] if len(texts) == 1 else "\n".join([f"{len(texts)} problems:", *lines]))
        error.problems = texts  # type: ignore[attr-defined]
        raise error
