"""The pools of all models that a run serves, as one EnginePool: the policy's, and those of frozen models.

A frozen model keeps the weights of its checkpoint and has devices of its own: updates and sleep do not reach it.
`config_of` gives the configuration that its engines see, so that a backend has one set of rules, settings and estimates
for all models.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from slime.config import Config, FlagGroup
from slime.protocols import EnginePool, RolloutEngine
from slime.roles.served import ENGINE_FLAGS, POLICY, ServedModel
from slime.rollout_backend import RolloutBackend


def config_of(config: Config, model: ServedModel, backend: RolloutBackend) -> Config:
    """The run's configuration as the engines of `model` see it: their checkpoint, devices and flags. ValueError for a
    flag that the engine does not know."""
    if not model.frozen:
        return config
    engine = backend.owners[0]
    groups = []
    for typed in model.args:
        name, given, value = typed.partition("=")
        field = engine.prefix + name.removeprefix("--").replace("-", "_")
        shown = f"{model.own_flags[ENGINE_FLAGS]}{typed}"
        groups.append(FlagGroup(shown, field, [value] if given else []))
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
        colocate=False,
        rollout_external_engine_addrs=None,
        use_rollout_routing_replay=False,
        replay_kept_tokens=0,
    )


Start = Callable[[Callable[[Callable[[], None]], object]], None]
"""The type of `EnginePool.start`."""


def in_own_flags(text: str, model: ServedModel) -> str:
    """A message about the engines of `model` with the flags that they have in place of the policy's."""
    for policys, own in model.own_flags.items():
        for typed in ("--vllm-", "--sglang-") if policys == ENGINE_FLAGS else (policys,):
            text = text.replace(typed, own)
    return text


class ServedModels:
    """EnginePool of the policy and of frozen models. The loop drives the policy's engines; all of them are started,
    supervised and ended together."""

    def __init__(self, policy: EnginePool, frozen: Mapping[str, EnginePool], name: str = "default") -> None:
        """`name`: of the policy, for hooks."""
        self._policy, self._frozen, self._name = policy, dict(frozen), name

    @property
    def pools(self) -> Mapping[str, EnginePool]:
        """By the name of the served model."""
        return {POLICY: self._policy, **self._frozen}

    @property
    def facts(self) -> Mapping[str, object]:
        """Those of the policy's engines; `frozen_engines`: what requests to each frozen model go to, by its name; and,
        for hooks, the routers of all models: `model_routers` (name -> URL), and `vllm_model_routers` and
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

    def start(self, meanwhile: Callable[[Callable[[], None]], object]) -> None:
        """The processes of all models start before any is waited for. See EnginePool."""
        start: Start = self._policy.start
        for pool in self._frozen.values():
            start = _around(pool, start)
        start(meanwhile)

    def publish(self, version: int) -> Mapping[str, float]:
        figures = self._policy.publish(version)
        self.allow_restarts()
        return figures

    def allow_restarts(self) -> None:
        for pool in (self._policy, *self._frozen.values()):
            pool.allow_restarts()

    def sleep(self) -> None:
        self._policy.sleep()

    def wake(self) -> bool:
        return self._policy.wake()

    def check_health(self) -> None:
        for pool in (self._policy, *self._frozen.values()):
            pool.check_health()

    def stop(self) -> None:
        pools = [self._policy, *self._frozen.values()]
        with ThreadPoolExecutor(len(pools)) as threads:
            list(threads.map(lambda pool: pool.stop(), pools))


def _around(pool: EnginePool, inner: Start) -> Start:
    """Start `pool`, and all that `inner` starts while its servers load. A server of either that has ended is noticed
    by the wait for the trainer."""

    def start(meanwhile: Callable[[Callable[[], None]], object]) -> None:
        def then(check: Callable[[], None]) -> None:
            inner(lambda other: meanwhile(functools.partial(_both, check, other)))

        pool.start(then)

    return start


def _both(one: Callable[[], None], other: Callable[[], None]) -> None:
    one()
    other()
