"""Defines the engine section: the rollout backend that runs the engines, and the values that the backend derives from
its flags.

The backend owns the flags of its engines and of its router. It checks them and fills in every field below except
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
    """Facts about engines that slime needs, whichever backend runs them."""

    project: str = "the engine"
    """Name of the engine in texts."""
    router: str = "a router"
    """Name of the router in texts."""
    memory_share: float = 0.9
    """Share of a GPU that an engine expects to be free at its start, and that it uses if `cache_bytes` is not given."""
    cache_bytes: int | None = None
    """Bytes of a GPU for keys and values. None or 0 means the rest of the share."""
    dtype: str | None = None
    """Dtype of the weights. None means the trainer's dtype."""
    weight_bytes: float | None = None
    """Bytes per weight of a layer's matrices, if the engine quantises them. None means the bytes of `dtype`."""
    invariant: bool = False
    """True if the engine can compute with the operators of rl_kernel.invariant."""
    drafts: bool = False
    """True if the engine loads the layers of multi-token prediction."""
    context: int | None = None
    """Maximum number of tokens of prompt and response together, if a flag sets it. None means the length in the model's
    config.json."""
    media_limits: dict[str, int] = field(default_factory=dict)
    """Kind of media -> largest number that a prompt may have in the engine. Other kinds have no limit."""
    data_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel: bool = False
    """True if the ranks of an engine have whole experts, instead of a part of each expert."""
    flag_of: dict[str, str] = field(default_factory=dict)
    """Field -> the flag that sets it."""

    def flag(self, name: str) -> str:
        """Returns the flag that sets a field."""
        return self.flag_of.get(name, name)


@dataclass(frozen=True)
class EngineConfig:
    """The values that the backend derives from its flags."""

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
        "number of the policy's engines that only read prompts; the others take the keys and values of prompts from "
        "them, and write the answers",
        range=COUNT,
    )
    server_concurrency: int = 512
    """Maximum number of requests in flight per engine."""
    adapts_concurrency: bool = False
    """True if `server_concurrency` is only the first maximum, which the times of requests change
    (`slime.rollout.stream.concurrency`)."""
    engine_facts: EngineFacts = field(default_factory=EngineFacts)
    backend_args: Values = field(default_factory=dict)
    """Typed values that the user gave, by the engine's own names."""
    backend_argv: list[str] = field(default_factory=list)
    """The same values as the engine's flags."""
    backend_env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the engines' processes."""
    router_args: Values = field(default_factory=dict)
    """Typed values that the user gave, by the router's own names."""
    router_argv: list[str] = field(default_factory=list)
    """The same values as the router's flags."""
    router_ip: str | None = None
    """Address of an external router."""
    router_port: int | None = None
    """Port of an external router. Without `router_ip`, the port of the run's own router."""
    hook_args: Values = field(default_factory=dict)
    """Values that hooks find in their `args` under the backend's names."""

    def __post_init__(self) -> None:
        if isinstance(self.engine_facts, dict):  # read from a saved config.json
            object.__setattr__(self, "engine_facts", EngineFacts(**self.engine_facts))
