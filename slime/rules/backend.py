"""Defines the interface between the command line and a rollout backend: its flags, and their translation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from slime.config.config_file import FlagGroup
from slime.config.fields import FlagSpec, Values
from slime.config.peer_names import NONE, PeerName
from slime.config.unsupported import Unsupported
from slime.rules.validate import Rule


class FlagOwner(Protocol):
    """A parser of another project that owns all flags with a prefix."""

    prefix: str

    def parse(self, groups: list[FlagGroup]) -> Values:
        """Checks the flags and returns the fields of the engine section that they fill. Raises ValueError for an
        invalid flag."""
        ...


class BackendFlags(Protocol):
    """The flags of a rollout backend.

    `specs`: the backend's own flags, by name. `owners`: parsers of the engine and the router, by prefix. `unsupported`,
    `no_effect`: see slime.config.unsupported. `foreign`: prefix of another engine's flags, which `translate` rewrites.
    `peer_names`: other trainers' settings for this engine. `rules` hold for a resolved configuration.
    """

    @property
    def name(self) -> str: ...

    @property
    def specs(self) -> Mapping[str, FlagSpec]: ...

    @property
    def owners(self) -> Sequence[FlagOwner]: ...

    @property
    def unsupported(self) -> Mapping[str, Unsupported]: ...

    @property
    def no_effect(self) -> Mapping[str, FlagSpec]: ...

    @property
    def foreign(self) -> str: ...

    @property
    def peer_names(self) -> Mapping[str, PeerName]: ...

    @property
    def rules(self) -> Sequence[Rule]: ...

    def translate(self, groups: list[FlagGroup]) -> tuple[list[FlagGroup], list[str]]:
        """Returns groups with the other engine's spellings rewritten, and remarks for the user."""
        ...

    def fields(self, own: Values, set_values: Values) -> Values:
        """Returns all fields of the engine section, from the values of the backend's own flags and the fields that its
        owners filled."""
        ...


class NoBackend:
    """A configuration that starts no engine: no flag belongs to a backend."""

    name = "none"
    specs: Mapping[str, FlagSpec] = {}
    owners: Sequence[FlagOwner] = ()
    unsupported: Mapping[str, Unsupported] = {}
    no_effect: Mapping[str, FlagSpec] = {}
    foreign = "\0"
    peer_names: Mapping[str, PeerName] = NONE
    rules: Sequence[Rule] = ()

    def translate(self, groups: list[FlagGroup]) -> tuple[list[FlagGroup], list[str]]:
        return groups, []

    def fields(self, own: Values, set_values: Values) -> Values:
        return {}
