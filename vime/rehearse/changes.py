"""The flags of a rehearsal, and every difference from the flags of the launch, with its reason."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from slime.config.config_file import FlagGroup, split_argv, with_config_files
from slime.config.fields import spelled


@dataclass(frozen=True)
class FlagChange:
    """One flag with its values in the launch and in the rehearsal (None: not given), and the reason."""

    flag: str
    before: str | None
    after: str | None
    why: str


@dataclass
class Flags:
    """The flags of a launch, changed one by one."""

    groups: list[FlagGroup]
    changes: list[FlagChange] = field(default_factory=list)

    @staticmethod
    def from_argv(argv: Sequence[str]) -> Flags:
        """Reads a command line with its --config files. The last use of a flag counts."""
        last = {group.name: group for group in with_config_files(split_argv(argv))}
        return Flags(list(last.values()))

    def values(self, name: str) -> list[str] | None:
        """Returns the values of a flag, or None if it is not given."""
        return next((group.values for group in self.groups if group.name == name), None)

    def value(self, name: str) -> str | None:
        """Returns the first value of a flag, or None."""
        return next(iter(self.values(name) or []), None)

    def number(self, name: str, default: int) -> int:
        """Returns a whole number, or `default` for a missing or another value, which the run itself will report."""
        value = self.value(name) or ""
        return int(value) if value.isdigit() else default

    def has(self, name: str) -> bool:
        return self.values(name) is not None

    def set(self, name: str, why: str, *values: object) -> None:
        """Gives a flag these values."""
        before, after = self.values(name), [str(value) for value in values]
        if before == after:
            return
        group = FlagGroup(spelled(name), name, after)
        self.groups = [each for each in self.groups if each.name != name] + [group]
        shown = None if before is None else shlex.join(before)
        self.changes.append(FlagChange(spelled(name), shown, shlex.join(after) or "given", why))

    def limit(self, name: str, most: int, why: str) -> None:
        """Lowers the flag `name` to `most` if the flag is given and higher."""
        if self.number(name, 0) > most:
            self.set(name, why, most)

    def drop(self, name: str, why: str) -> None:
        before = self.values(name)
        if before is not None:
            self.groups = [group for group in self.groups if group.name != name]
            self.changes.append(FlagChange(spelled(name), shlex.join(before) or "given", None, why))

    @property
    def argv(self) -> list[str]:
        return [token for group in self.groups for token in group.tokens]
