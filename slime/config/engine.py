"""Flags of the engine section: what this project itself asks of the rollout servers.

`--vllm-*` and `--router-*` flags that are not declared here belong to the parsers of the engine and of the
router (see vime/engine/flags.py), which check them and fill in the fields below that are no flags.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slime.config.fields import flag


@dataclass(frozen=True)
class EngineConfig:
    """`*_args` are typed values the user gave, by the engine's own names; `*_argv` the same as its flags."""

    rollout_backend: str = flag("vllm", "rollout engine", choices=("vllm",))
    vllm_server_concurrency: int = flag(512, "maximum number of requests in flight per engine")
    vllm_args: dict[str, Any] = field(default_factory=dict)
    vllm_argv: list[str] = field(default_factory=list)
    router_args: dict[str, Any] = field(default_factory=dict)
    router_argv: list[str] = field(default_factory=list)
