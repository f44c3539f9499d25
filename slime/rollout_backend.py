"""This module defines the interface of an inference engine. The implementations are packages of vime."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from slime.config import Config
from slime.protocols import EnginePool, WeightSource
from slime.roles.served import ServedModel
from slime.rules import BackendFlags
from slime.rules.listing import Row
from slime.rules.validate import Rule

if TYPE_CHECKING:
    from slime.cluster.placement import Placement


class RolloutBackend(BackendFlags, Protocol):
    """The interface of an inference engine that generates rollouts.

    `BackendFlags` defines the flags and their translation. An `EnginePool` has the engines. `engine_rules` are the
    rules from `rules` that apply to the engines of each served model.
    """

    @property
    def engine_rules(self) -> Sequence[Rule]: ...

    def remarks(self, config: Config) -> Iterable[str]:
        """Returns notes for the user. Raises ValueError for an installation that cannot work."""
        ...

    def rows(self) -> Iterable[Row]:
        """Returns the flags of the engine and the router, for `vime flags`."""
        ...

    def command_lines(self, config: Config) -> Iterable[str]:
        """Returns the command-line options that the servers will get, for `vime plan`."""
        ...

    def require_reachable(self, config: Config) -> None:
        """Raises ValueError within 15 s if an external engine or router does not answer or cannot be used, or if the
        engines cannot run on this machine. A run calls this method before it starts a process."""
        ...

    def pool(
        self, config: Config, placed: Placement, source: WeightSource | None, model: ServedModel
    ) -> EnginePool:
        """Returns the engines of `model`, which are not started yet, with the flags and devices in `config`. `source`
        is the trainer if the engines get its weights, otherwise None."""
        ...
