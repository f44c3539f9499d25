"""The engine section: which rollout backend runs the engines, and what it makes of its own flags.

The backend owns the flags of its engines and of its router. It checks them and fills in every field below but
`rollout_backend`; slime reads no flag of an engine by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slime.config.fields import Values, flag
from slime.config.ranges import COUNT

DEFAULT_BACKEND = "vllm"


@dataclass(frozen=True)
class EngineFacts:
    """What slime must know about engines, whichever backend runs them."""

    project: str = "the engine"
    """The name of the engine in texts."""
    router: str = "a router"
    """The name of the router in texts."""
    memory_share: float = 0.9
    """Part of a GPU that an engine wants to find free when it starts, and takes where `cache_bytes` is not given."""
    cache_bytes: int | None = None
    """Bytes of a GPU for keys and values. None or 0: what the share leaves."""
    dtype: str | None = None
    """Of the weights. None: the trainer's."""
    weight_bytes: float | None = None
    """Bytes per weight of a layer's matrices, if the engine quantises them. None: those of `dtype`."""
    invariant: bool = False
    """Whether it can compute with the operators of rl_kernel.invariant."""
    drafts: bool = False
    """Whether the engine has the layers of multi-token prediction."""
    context: int | None = None
    """The most tokens that prompt and response may have together, where a flag sets it. None: the length in
    the model's config.json counts."""
    data_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    flag_of: dict[str, str] = field(default_factory=dict)
    """Field -> the flag that sets it."""

    def flag(self, name: str) -> str:
        """The flag that sets a field."""
        return self.flag_of.get(name, name)


@dataclass(frozen=True)
class EngineConfig:
    """What the backend makes of its flags."""

    rollout_backend: str = flag(DEFAULT_BACKEND, "rollout engine")
    policy_name: str = flag("default", "name of the trained model in the `args` of hooks (`get_model_url`)")
    frozen_model: list[dict[str, Any]] = flag(  # noqa: RUF009
        [],
        "a model that engines of the run serve beside the policy, with the weights of its checkpoint: JSON with name, "
        "model_path, num_gpus, num_gpus_per_engine and args; may be repeated; a file of models becomes it",
        append=True,
    )
    prefill_num_servers: int | None = flag(
        None,
        "number of the policy's engines that only read prompts; the others only write answers. `vime plan` lays them "
        "out, and a run is an error in this version",
        range=COUNT,
    )
    server_concurrency: int = 512
    """Maximum number of requests in flight per engine."""
    adapts_concurrency: bool = False
    """That is the first maximum, and what requests report changes it (`slime.rollout.stream.concurrency`)."""
    engine_facts: EngineFacts = field(default_factory=EngineFacts)
    backend_args: Values = field(default_factory=dict)
    """Typed values that the user gave, by the engine's own names."""
    backend_argv: list[str] = field(default_factory=list)
    """The same as the engine's flags."""
    backend_env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the engines' processes."""
    router_args: Values = field(default_factory=dict)
    """Typed values that the user gave, by the router's own names."""
    router_argv: list[str] = field(default_factory=list)
    """The same as the router's flags."""
    router_ip: str | None = None
    """Of a router that was started apart."""
    router_port: int | None = None
    """Of a router that was started apart. A port alone is the one of the run's own router."""
    hook_args: Values = field(default_factory=dict)
    """What hooks find in their `args` under the backend's names."""

    def __post_init__(self) -> None:
        if isinstance(self.engine_facts, dict):  # from a saved config.json
            object.__setattr__(self, "engine_facts", EngineFacts(**self.engine_facts))
