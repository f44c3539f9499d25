"""Lists the rollout backends, one per line, and parses a command line with the flags of its backend.

`--rollout-backend` names a backend, which implements `slime.rollout_backend.RolloutBackend`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from slime.config import Config, FlagGroup
from slime.config.problems import with_prefix
from slime.config.variables import check_variables, variable_notes
from slime.data.limits.context import longest_sequence
from slime.protocols import EnginePool, NoEngines, WeightSource
from slime.roles.served import served_models, teachers
from slime.rollout_backend import RolloutBackend
from slime.rules import parse_args
from slime.rules.listing import Row, own_rows
from slime.rules.parser import check_flags
from slime.rules.validate import Rule
from vime.pool.served import ServedEngines, ServedModels, spelled_for
from vime.sglang.backend import SglangBackend
from vime.switch import from_environment
from vime.vllm.backend import VllmBackend

if TYPE_CHECKING:
    from slime.cluster.placement import Placement

BACKENDS: dict[str, RolloutBackend] = {
    "vllm": VllmBackend(),
    "sglang": SglangBackend(),
}

__path__: list[str] = []  # an empty package for the plug-in paths vime.backends.*, see vime.alias


def backend_for(config: Config) -> RolloutBackend:
    """Returns the backend that runs the engines of this configuration."""
    return BACKENDS[config.engine.rollout_backend]


def served_engines(config: Config) -> Iterator[ServedEngines]:
    """Yields the engines of each model that the run serves."""
    for model in served_models(config):
        yield ServedEngines.from_model(config, model, BACKENDS[model.backend])


def make_pools(config: Config, placed: Placement, source: WeightSource | None) -> ServedModels:
    """Returns every model's engines, not started yet. `source` is the trainer, if the run has one."""
    policy: EnginePool = NoEngines()
    frozen: dict[str, EnginePool] = {}
    spelled = {}
    for engines in served_engines(config):
        model = engines.model
        pool = engines.backend.pool(engines.settings, placed, None if model.frozen else source, model)
        if model.frozen:
            frozen[model.name], spelled[model.name] = pool, engines.spelled
        else:
            policy = pool
    return ServedModels(policy, frozen, config.engine.policy_name, spelled)


def require_reachable(config: Config) -> None:
    """Checks that every model's engines are reachable: see `RolloutBackend.require_reachable`."""
    for engines in served_engines(config):
        engines.require_reachable()


def check_served(config: Config) -> None:
    """Checks that each frozen model's engines fit the model and their devices."""
    for model in served_models(config):
        if not model.frozen:
            continue
        try:
            with spelled_for(model):
                ServedEngines.from_model(config, model, BACKENDS[model.backend]).check()
        except ValueError as error:
            raise with_prefix(error, f"the engines of {model.name} must fit their model, got: ") from error


def parse_config(argv: Sequence[str], rules: Sequence[Rule] = (), *, download: bool = False) -> Config:
    """Returns the resolved, validated configuration of a command line and of vime.switch's variables. Raises ValueError
    for an invalid one.

    `rules` are more checks, whose errors are in the same report. With `download`, the function fetches --hf-checkpoint
    and --ref-load if they name models of the Hugging Face hub.
    """
    config = parse_args(
        argv, BACKENDS, _from_environment, (_check_variables, check_served, *rules), download=download
    )
    config = _within_teachers(config)
    served = {engines.model.backend for engines in served_engines(config)}
    notes = (*variable_notes(config, os.environ, served), *backend_for(config).remarks(config))
    return dataclasses.replace(config, notes=(*config.notes, *notes))


def _within_teachers(config: Config) -> Config:
    """Returns the configuration with a context in which every served teacher can score a whole sample.

    An engine that scores a sequence generates one more token.
    """
    if not (scoring := {model.name for model in teachers(config).values()}):
        return config
    facts = config.engine.engine_facts
    tokens, _ = longest_sequence(config)
    for engines in served_engines(config):
        name = engines.model.name
        teacher_tokens, setting = longest_sequence(engines.settings) if name in scoring else (None, "")
        if teacher_tokens is not None and (tokens is None or teacher_tokens - 1 < tokens):
            tokens = teacher_tokens - 1
            reason = f"one less than {engines.spelled(setting)} of {name}"
            named = {**facts.flag_of, "context": reason}
            facts = dataclasses.replace(facts, context=tokens, flag_of=named)
    return config.with_values(engine_facts=facts)


def check_each(argv: Sequence[str]) -> None:
    """Checks each flag of a command line separately. Raises one ValueError with every problem."""
    check_flags(argv, BACKENDS, _from_environment)


def public_rows() -> Iterator[Row]:
    """Returns rows of the flags that this project implements, accepts at their default, or accepts without effect."""
    return own_rows(BACKENDS)


def _check_variables(config: Config) -> None:
    check_variables(config, os.environ)


def _from_environment(groups: list[FlagGroup]) -> tuple[list[FlagGroup], list[str]]:
    added, remarks = from_environment(groups, os.environ)
    return [*groups, *added], remarks
