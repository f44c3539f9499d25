"""The engine section: which rollout backend runs the engines, and what it makes of its own flags.

The backend owns the flags of its engines and of its router. It checks them and fills in every field below but
`rollout_backend`; slime reads no flag of an engine by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slime.config.fields import Values, flag

DEFAULT_BACKEND = "vllm"


@dataclass(frozen=True)
class EngineFacts:
    """What slime must know about engines, whichever backend runs them.

    `project`, `router`: the names of engine and router in texts. `memory_share`: part of a GPU that an engine wants to
    find free when it starts, and takes where `cache_bytes` is not given. `cache_bytes`: bytes of a GPU for keys and
    values; None or 0: what the share leaves. `dtype`: of the weights; None: the trainer's. `weight_bytes`: per weight
    of a layer's matrices, if the engine quantises them; None: those of `dtype`. `drafts`: whether the engine has the
    layers of multi-token prediction. `flag_of`: field -> the flag that sets it.
    """

    project: str = "the engine"
    router: str = "a router"
    memory_share: float = 0.9
    cache_bytes: int | None = None
    dtype: str | None = None
    weight_bytes: float | None = None
    drafts: bool = False
    data_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    flag_of: dict[str, str] = field(default_factory=dict)

    def flag(self, name: str) -> str:
        """The flag that sets a field."""
        return self.flag_of.get(name, name)


@dataclass(frozen=True)
class EngineConfig:
    """`*_args` are typed values that the user gave, by the engine's own names; `*_argv` are the same as its flags.
    `backend_env`: environment variables of the engines' processes.
    `router_ip`, `router_port`: a router that was started apart; a port alone is the one of the run's own router.
    `server_concurrency`: maximum number of requests in flight per engine. `hook_args`: what hooks find in their `args`
    under the backend's names."""

    rollout_backend: str = flag(DEFAULT_BACKEND, "rollout engine")
    server_concurrency: int = 512
    engine_facts: EngineFacts = field(default_factory=EngineFacts)
    backend_args: Values = field(default_factory=dict)
    backend_argv: list[str] = field(default_factory=list)
    backend_env: dict[str, str] = field(default_factory=dict)
    router_args: Values = field(default_factory=dict)
    router_argv: list[str] = field(default_factory=list)
    router_ip: str | None = None
    router_port: int | None = None
    hook_args: Values = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.engine_facts, dict):  # from a saved config.json
            object.__setattr__(self, "engine_facts", EngineFacts(**self.engine_facts))
