"""Reports all problems of a command line together. Owns how problems are collected, left out and printed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from slime.records.errors import FlagError

T = TypeVar("T")


def require_value(value: T | None) -> T:
    """Returns the value of a flag that an earlier rule requires. Raises TypeError without a value; see
    `Problems.check`."""
    if value is None:
        raise TypeError(
            "a rule must find the value that an earlier rule requires, got none; report this as a bug"
        )
    return value


class ProblemsError(ValueError):
    """Several problems in one report, with one per line."""

    def __init__(self, problems: tuple[ValueError, ...]) -> None:
        self.problems = problems
        lines = [f"  {number}. {problem}" for number, problem in enumerate(problems, start=1)]
        super().__init__("\n".join([f"{len(problems)} problems:", *lines]))

    def __reduce__(self) -> tuple[type[ProblemsError], tuple[tuple[ValueError, ...]]]:
        return ProblemsError, (self.problems,)


def split_problems(error: ValueError) -> tuple[ValueError, ...]:
    """Returns the problems of a report, or a tuple of the error alone."""
    return error.problems if isinstance(error, ProblemsError) else (error,)


def renamed(error: ValueError, spelling: Callable[[str], str]) -> ValueError:
    """Returns the error, or a report with each problem, with its flags as `spelling` returns them."""
    if isinstance(error, ProblemsError):
        return ProblemsError(tuple(renamed(problem, spelling) for problem in error.problems))
    return error.renamed(spelling) if isinstance(error, FlagError) else error


def with_prefix(error: ValueError, prefix: str) -> ValueError:
    """Returns the error with `prefix` before its text."""
    return error.after(prefix) if isinstance(error, FlagError) else ValueError(f"{prefix}{error}")


class Problems:
    """Collects the ValueErrors of independent checks. `report` raises them together.

    Checks run in stages. A problem that names a flag of an earlier stage's problem is left out, because the earlier
    problem may be its cause. For example, an unknown `--rolout-batch-size` also leaves `--rollout-batch-size` without a
    value. Only a `FlagError` names flags. Another ValueError names no flag.
    """

    def __init__(self) -> None:
        self._found: list[ValueError] = []
        self._named: set[str] = set()
        self._with_causes: set[ValueError] = set()

    def check(
        self, rule: Callable[..., T], *args: object, origin: str = "", causes: Iterable[str] = ()
    ) -> T | None:
        """Returns the result of `rule(*args)`, or None if it raises ValueError.

        `origin` is the source of the value. `causes` has the flags whose later problems are left out if this rule finds
        a problem, instead of the flags that the problem names.
        """
        try:
            return rule(*args)
        except ValueError as error:
            added = self.add(*split_problems(error), origin=origin)
            if causes:
                self._named.update(causes)
                self._with_causes.update(added)
        except (TypeError, ArithmeticError, AssertionError):
            # An earlier problem left a value out or left it 0. Without an earlier problem, this is a bug.
            if not self._found:
                raise
        return None

    def add(self, *problems: ValueError, origin: str = "") -> list[ValueError]:
        """Collects problems. Returns those that no earlier problem may have caused, in the form of the report."""
        added = [problem for problem in problems if not _flags(problem) & self._named]
        if origin:
            added = [with_prefix(problem, f"{origin}: ") for problem in added]
        self._found += added
        return added

    def next_stage(self) -> None:
        """Ends a stage: the problems so far may cause later problems with the same flags."""
        for problem in self._found:
            if problem not in self._with_causes:
                self._named |= _flags(problem)

    def report(self) -> None:
        """Raises ValueError if there are problems: the only one as it is, or ProblemsError."""
        by_text = {str(problem): problem for problem in reversed(self._found)}
        found = tuple(by_text[text] for text in dict.fromkeys(map(str, self._found)))
        if found:
            raise found[0] if len(found) == 1 else ProblemsError(found)


def _flags(problem: ValueError) -> frozenset[str]:
    return problem.flags if isinstance(problem, FlagError) else frozenset()
