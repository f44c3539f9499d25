"""The rollout backends, one line each, and the configuration of a command line with the flags of one of them.

`--rollout-backend` names a backend. What it implements is `slime.rollout_backend.RolloutBackend`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence

from slime.config import Config, FlagGroup
from slime.rollout_backend import RolloutBackend
from slime.rules import parse_args
from slime.rules.listing import Row, own_rows
from slime.rules.parser import check_flags
from slime.rules.validate import Rule
from vime.sglang.backend import SglangBackend
from vime.switch import from_environment
from vime.vllm.backend import VllmBackend

BACKENDS: dict[str, RolloutBackend] = {
    "vllm": VllmBackend(),
    "sglang": SglangBackend(),
}

__path__: list[str] = []  # an empty package for the plug-in paths vime.backends.*, see vime.alias


def backend_of(config: Config) -> RolloutBackend:
    """The backend that runs the engines of this configuration."""
    return BACKENDS[config.engine.rollout_backend]


def parse_config(argv: Sequence[str], rules: Sequence[Rule] = (), *, download: bool = False) -> Config:
    """The resolved, validated configuration of a command line and of vime.switch's variables. ValueError when wrong.

    `rules` are more checks, whose errors are in the same report. `download`: fetch --hf-checkpoint and --ref-load if
    they name models of the Hugging Face hub.
    """
    config = parse_args(argv, BACKENDS, _from_environment, rules, download=download)
    return dataclasses.replace(config, notes=(*config.notes, *backend_of(config).remarks(config)))


def check_each(argv: Sequence[str]) -> None:
    """Check each flag of a command line by itself. One ValueError with every problem."""
    check_flags(argv, BACKENDS, _from_environment)


def public_rows() -> Iterator[Row]:
    """The flags that this project acts on, accepts at their default, or accepts without effect."""
    return own_rows(BACKENDS)


def _from_environment(groups: list[FlagGroup]) -> tuple[list[FlagGroup], list[str]]:
    added, remarks = from_environment(groups, os.environ)
    return [*groups, *added], remarks
