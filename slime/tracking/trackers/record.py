"""What a tracker is, the record by which a run knows one, and the change of names that a tracker refuses."""

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
"""How a run ended."""


class Tracker(Protocol):
    """Receives metrics. `log` accepts floats that are not finite. Steps of one key never decrease."""

    def log(self, metrics: Mapping[str, float], step: int, step_key: StepKey) -> None: ...

    def close(self, state: State) -> None: ...


@dataclass(frozen=True)
class TrackerKind:
    """A tracker that a flag switches on.

    `make(config, run_dir, resume)`: `resume` maps a step key to the first step that will be logged again. `module`:
    what it imports, of the package `package`. `optional`: a run without the package notes it and goes on, as in slime.
    `check`: a quick check on the driver's host before anything starts; ValueError if `make` would fail.
    """

    flag: str
    asked: Callable[[LoggingConfig], bool]
    module: str
    package: str
    make: Callable[[Config, Path, Mapping[str, int]], Tracker]
    optional: bool = False
    check: Callable[[Config], None] | None = None


@dataclass
class Names:
    """slime's name -> the name for a tracker that refuses some characters: each of them (`refused`) becomes `_`.

    If two names become equal, the one that was logged later ends in `_2`, the next in `_3`.
    """

    refused: re.Pattern[str]
    _given: dict[str, str] = field(default_factory=dict)

    def of(self, name: str) -> str:
        if name not in self._given:
            plain = self.refused.sub("_", name)
            taken, given, number = set(self._given.values()), plain, 2
            while given in taken:
                given, number = f"{plain}_{number}", number + 1
            self._given[name] = given
        return self._given[name]


def run_name(given: str | None, config: Config, run_dir: Path) -> str:
    """The name of a run where its tracker shows it: the flag's, else --wandb-group, else that of the run directory."""
    return given or config.logging.wandb_group or Path(run_dir).resolve().name
