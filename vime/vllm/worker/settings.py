"""Defines the settings that a run gives to the workers of its engines, in vLLM's --additional-config under the name
`vime`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OPTION = "additional-config"
_NAME = "vime"


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings of the work that an engine's workers do in addition to vLLM's own work. The defaults change nothing."""

    gate: str | None = None
    """File whose appearance lets a worker take its device (vime.vllm.worker.shared_gpu). With None, the worker does not
    wait."""
    temperature: float = 1.0
    """Divisor of the model's logits, applied before a request's own temperature."""
    routed_experts: bool = False
    """True if answers contain each token's experts."""
    bitwise: tuple[str, ...] = ()
    """Names in slime's BITWISE_OPERATORS of the operators that the engine uses from rl_kernel.invariant."""
    fp8_scales: str | None = None
    """Scales of the products of linear layers in rl_kernel.fp8, which replaces rl_kernel.invariant there: float32, or
    ue8m0 for powers of two. None for products in the dtype of the weights."""

    def flags(self, user_tokens: Sequence[str] = ()) -> list[str]:
        """Returns vLLM's flag with these settings and with the user's value of the same flag. The list is empty if both
        are empty.

        `user_tokens` has the tokens of the user's --additional-config: one "--additional-config=JSON" or two tokens.
        """
        text = user_tokens[-1].partition("=")[2] if len(user_tokens) == 1 else "".join(user_tokens[1:])
        ours = {name: value for name, value in asdict(self).items() if value != _DEFAULTS[name]}
        merged = {**(_parsed(text) if user_tokens else {}), **({_NAME: ours} if ours else {})}
        return [f"--{OPTION}", json.dumps(merged)] if merged else []

    @classmethod
    def from_config(cls, config: VllmConfig) -> EngineSettings:
        """Returns the settings of the engine with this configuration."""
        more = config.additional_config
        found = dict(more.get(_NAME, {})) if isinstance(more, dict) else {}
        return cls(**{**found, "bitwise": tuple(found.get("bitwise", ()))})

    @classmethod
    def take(cls, config: VllmConfig) -> EngineSettings:
        """Returns the settings as `from_config` does, and removes the gate from the configuration.

        vLLM keeps compiled code under a hash of the configuration, and the path of the gate differs from run to run.
        """
        found = cls.from_config(config)
        more = config.additional_config
        if found.gate is not None and isinstance(more, dict):
            config.additional_config = {**more, _NAME: asdict(replace(found, gate=None))}
        return found


_DEFAULTS = asdict(EngineSettings())


def _parsed(text: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(
            f"--vllm-{OPTION} must be one JSON object, got {text!r}; write it as '{{\"name\": value}}'"
        )
    return found
