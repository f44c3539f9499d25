"""Defines the interface of a tracker, the record that describes a tracker, and the replacement of characters that a
tracker refuses."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from slime.tracking.metrics import StepKey

if TYPE_CHECKING:
    from slime.config.schema import Config
    from slime.config.sections.logging import LoggingConfig

State = Literal["finished", "interrupted", "failed"]
"""Final state of a run."""


class Tracker(Protocol):
    """Receives metrics. `log` accepts floats that are not finite. Steps with the same key never decrease."""

    def log(self, metrics: Mapping[str, float], step: int, step_key: StepKey) -> None: ...

    def close(self, state: State) -> None: ...


@dataclass(frozen=True)
class TrackerKind:
    """Describes a tracker that a flag switches on.

    `make(config, run_dir, resume)`: `resume` maps a step key to the first step that will be logged again. `module`:
    name of the module that it imports from the package `package`. `optional`: without the package, a run prints a note
    and continues, as in slime. `check`: a quick check on the driver's host before anything starts. It raises ValueError
    if `make` would fail.
    """

    flag: str
    asked: Callable[[LoggingConfig], bool]
    module: str
    package: str
    make: Callable[[Config, Path, Mapping[str, int]], Tracker]
    optional: bool = False
    check: Callable[[Config], None] | None = None


@dataclass
class TrackerNames:
    """Maps slime's name to a name for a tracker: each character that the tracker refuses (`refused`) becomes `_`.

    If two names become equal, the name that was logged later ends in `_2`, the next in `_3`.
    """

    refused: re.Pattern[str]
    _names: dict[str, str] = field(default_factory=dict)

    def of(self, name: str) -> str:
        if name not in self._names:
            plain = self.refused.sub("_", name)
            taken, chosen, number = set(self._names.values()), plain, 2
            while chosen in taken:
                chosen, number = f"{plain}_{number}", number + 1
            self._names[name] = chosen
        return self._names[name]


def run_name(chosen: str | None, config: Config, run_dir: Path) -> str:
    """Returns the name of a run in its tracker: the flag's, else --wandb-group, else the name of the run directory."""
    return chosen or config.logging.wandb_group or Path(run_dir).resolve().name
