"""Makes an engine's log-probs bitwise equal to the trainer's: vLLM's layers with the operators of
`rl_kernel.invariant`.

`register` stores classes in vLLM's own registries of layers and of attention backends, before vLLM builds the model.
`require` runs before the first weights are loaded. Every module of the model must be our class, or a module that only
calls other modules. docs/design/bitwise.md lists which side of vLLM computes which operator.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import TYPE_CHECKING

from slime.config.sections.kernels import BITWISE_OPERATORS

if TYPE_CHECKING:
    from torch import nn

_COMPILATION = {"mode": 0, "cudagraph_mode": "FULL_AND_PIECEWISE"}
ENVIRONMENT = {
    "VLLM_USE_BREAKABLE_CUDAGRAPH": "1",  # graphs of parts without torch.compile
    "VLLM_DISABLE_SHARED_EXPERTS_STREAM": "1",  # one stream issues the sums over ranks in the same order on each rank
}
"""Environment variables of a bitwise server, on each device."""


def compilation() -> str:
    """Returns vLLM's --compilation-config on GPUs, with which nothing is compiled.

    A step with one token per request is one graph. Other steps have one graph for each part between two attentions.
    """
    return json.dumps(_COMPILATION)


def register(chosen: Collection[str], fp8_scales: str | None = None) -> None:
    """Registers our layers and our attention in this process, and replaces the log-probs of the newer model runner.

    `chosen` holds names of slime's BITWISE_OPERATORS, and `fp8_scales` is that of `EngineSettings`. Repeated calls are
    allowed.
    """
    from vime.vllm import patches
    from vime.vllm.worker.bitwise import attention, layers

    layers.register(chosen, fp8_scales)
    if "attention" in chosen:
        attention.register()
    if "head" in chosen:
        patches.apply("bitwise worker")


def use_log_probs(runner: object) -> None:
    """Makes the sampler of an older model runner compute our log-probs."""
    from vime.vllm.worker.bitwise import sampling

    sampling.use_log_probs(runner)


def adapt(model: nn.Module, chosen: Collection[str]) -> None:
    """Sets our operators in modules that vLLM builds without its registry. Call it once, before the first pass."""
    if "product" in chosen:
        from vime.vllm.worker.bitwise import experts

        experts.replace_plain_routers(model)
        experts.scale_weights(model)


def require(model: nn.Module, chosen: Collection[str]) -> None:
    """Raises ValueError with the modules that do not compute with our operators, or with our operators that are not
    bitwise equal on this machine.

    Checks only an engine that has `chosen` all of our operators.
    """
    from slime import operators
    from vime.vllm.worker.bitwise.check import not_ours

    if frozenset(chosen) != frozenset(BITWISE_OPERATORS):
        return
    if found := not_ours(model):
        raise ValueError(
            f"--rlk-bitwise must have every operator of the engine from rl_kernel.invariant, got {', '.join(found)}; "
            "leave --rlk-bitwise out for this model"
        )
    weight = next(model.parameters())
    operators.require_promise("engine", weight.device, weight.dtype)
