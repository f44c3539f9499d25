"""Makes the engine settings of each model that a run serves, and combines the models' pools in one EnginePool.

A frozen model keeps its checkpoint's weights and has its own devices. Its engines get no updates and do not sleep.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from slime.config import Config, FlagGroup
from slime.config.problems import renamed
from slime.protocols import EnginePool, RolloutEngine
from slime.records.errors import replace_flags
from slime.roles.served import POLICY, ServedModel
from slime.rollout_backend import RolloutBackend

_PREFIXES = ("--vllm-", "--sglang-")
"""Prefixes of flags for the policy's engines."""


@dataclass(frozen=True)
class ServedEngines:
    """The backend and the settings of a served model's engines, and the names of their flags."""

    model: ServedModel
    backend: RolloutBackend
    settings: Config
    """The run's configuration for the policy's engines. For a frozen model, the fields for engines have the values of
    the model's checkpoint, devices and flags."""

    @classmethod
    def from_model(cls, config: Config, model: ServedModel, backend: RolloutBackend) -> ServedEngines:
        """Makes the engine settings of `model` in the run. Raises ValueError for an unknown engine flag."""
        return cls(model, backend, _settings(config, model, backend) if model.frozen else config)

    def spelled(self, text: str) -> str:
        """Returns a text of this project with this model's flags in place of the policy's."""
        return replace_flags(text, functools.partial(_spelled, self.model))

    def check(self) -> None:
        """Raises ValueError unless the engines fit their model and their devices."""
        with spelled_for(self.model):
            for rule in self.backend.engine_rules:
                rule(self.settings)

    def require_reachable(self) -> None:
        """Calls `RolloutBackend.require_reachable` with these settings."""
        with spelled_for(self.model):
            self.backend.require_reachable(self.settings)


@contextmanager
def spelled_for(model: ServedModel) -> Iterator[None]:
    """Raises the block's errors with the flags of `model` in place of the policy's."""
    try:
        yield
    except ValueError as error:
        raise renamed(error, functools.partial(_spelled, model)) from error


def _spelled(model: ServedModel, flag: str) -> str:
    prefix = next((start for start in _PREFIXES if flag.startswith(start)), None)
    if prefix is None:
        return model.spelling.of(flag)
    return model.spelling.engine_flag(flag.removeprefix(prefix), prefix)


def _settings(config: Config, model: ServedModel, backend: RolloutBackend) -> Config:
    """Returns the settings of a frozen model's engines. The flags of the policy's engines and router are ignored."""
    engine = backend.owners[0]
    groups = []
    for typed in model.args:
        name, equals, value = typed.partition("=")
        field = engine.prefix + name.removeprefix("--").replace("-", "_")
        groups.append(FlagGroup(model.spelling.engine_flag(typed), field, [value] if equals else []))
    own = {
        "backend_args": {},
        "backend_argv": [],
        "router_ip": None,
        "router_port": None,
        "router_args": {},
        "router_argv": [],
        "backend_env": {},
        **engine.parse(groups),
    }
    return config.with_values(
        **backend.fields({}, {"rollout_backend": model.backend, **own}),
        hf_checkpoint=model.checkpoint,
        rollout_num_gpus=model.devices,
        rollout_num_gpus_per_engine=model.devices_per_engine,
        rollout_engines_per_gpu=1,
        colocate=False,
        rollout_external_engine_addrs=None,
        use_rollout_routing_replay=False,
        replay_kept_tokens=0,
    )


class ServedModels:
    """An EnginePool of the policy and the frozen models. The loop controls only the policy's engines. All engines
    start, are supervised and end together."""

    def __init__(
        self,
        policy: EnginePool,
        frozen: Mapping[str, EnginePool],
        name: str = "default",
        spelled: Mapping[str, Callable[[str], str]] | None = None,
    ) -> None:
        """Stores the pools. `name` is the policy's name for hooks. `spelled` has the functions that put the flags of
        frozen models into texts (`ServedEngines.spelled`), by the names of these models."""
        self._policy, self._frozen, self._name = policy, dict(frozen), name
        self._all = (policy, *frozen.values())
        self._spelled = spelled or {}

    @property
    def pools(self) -> Mapping[str, EnginePool]:
        """Returns the pools by the name of the served model."""
        return {POLICY: self._policy, **self._frozen}

    @property
    def facts(self) -> Mapping[str, object]:
        """Returns the facts of the policy's pool, and `frozen_engines` (name of a frozen model -> its client). Hooks
        also get the routers of all models: `model_routers` (name -> URL), `vllm_model_routers` and
        `sglang_model_routers` (name -> (address, port))."""
        frozen = {name: pool.facts for name, pool in self._frozen.items()}
        each = {self._name: self._policy.facts, **frozen} if self._policy.facts else {}
        routers = {name: (its["vllm_router_ip"], its["vllm_router_port"]) for name, its in each.items()}
        return {
            **self._policy.facts,
            "frozen_engines": {name: pool.client() for name, pool in self._frozen.items()},
            "own_servers": [server for its in each.values() for server in its["own_servers"]],  # type: ignore[attr-defined]
            "model_routers": {name: its["router_url"] for name, its in each.items()},
            "vllm_model_routers": routers,
            "sglang_model_routers": routers,
        }

    def client(self) -> RolloutEngine | None:
        return self._policy.client()

    def launch(self) -> None:
        """Starts the processes of all models. If a process does not start, the processes of all models are stopped."""
        with self._stopped_on_failure():
            self._call(lambda pool: pool.launch())

    def check_launched(self) -> None:
        self._call(lambda pool: pool.check_launched())

    def wait_ready(self) -> None:
        """Returns when the engines of all models serve. See EnginePool."""
        with self._stopped_on_failure():
            self._call(lambda pool: pool.wait_ready())

    def _call(self, method: Callable[[EnginePool], None]) -> None:
        """Calls a method of each pool. A RuntimeError of a frozen model's pool gets the model's name and flags."""
        for name, pool in self.pools.items():
            try:
                method(pool)
            except RuntimeError as error:
                if name not in self._frozen:
                    raise
                message = f"the engines of {name} failed: {self._spelled.get(name, str)(str(error))}"
                raise RuntimeError(message) from error

    @contextmanager
    def _stopped_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.stop()
            raise

    def publish(self, version: int) -> Mapping[str, float]:
        figures = self._policy.publish(version)
        self.allow_restarts()
        return figures

    def allow_restarts(self) -> None:
        for pool in self._all:
            pool.allow_restarts()

    def sleep(self) -> None:
        self._policy.sleep()

    def wake(self) -> bool:
        return self._policy.wake()

    def check_health(self) -> None:
        self._call(lambda pool: pool.check_health())

    def stop(self) -> None:
        with ThreadPoolExecutor(len(self._all)) as threads:
            list(threads.map(lambda pool: pool.stop(), self._all))
