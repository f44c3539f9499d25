"""Rules and notes for Megatron's own settings, under the names of Megatron's fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from slime.config.fields import spelled

if TYPE_CHECKING:
    from slime.config.schema import Config

_SPELLED = {"fp8": "--fp8-format", "fp4": "--fp4-format", "fp4_param": "--fp4-param-gather"}
_NEVER_RUN = (
    "cuda_graph_impl",
    "enable_cuda_graph",
    "external_cuda_graph",
    "cpu_offloading",
    "optimizer_cpu_offload",
    "use_precision_aware_optimizer",
)


def check_local_layers(c: Config) -> None:
    """fp8 and fp4 need Transformer Engine. Without it, Megatron's fp8 context is empty and the run would silently use
    bf16."""
    overrides = c.megatron.overrides
    if overrides.get("transformer_impl") == "transformer_engine":
        return
    for name, value in overrides.items():
        low = name.startswith(("fp8", "fp4"))
        if value and (low or name == "tp_comm_overlap"):
            flag, what = _SPELLED.get(name, spelled(name)), name[:3] if low else "this overlap"
            raise ValueError(
                f"{flag} must be left out with --transformer-impl local, got {'it' if value is True else value}; "
                f"{what} needs Transformer Engine"
            )


def never_run(overrides: dict[str, Any]) -> Iterator[str]:
    """A note for each setting that goes to Megatron only and that no test or measurement covers."""
    for name in _NEVER_RUN:
        if overrides.get(name) not in (None, False, "none"):
            yield f"{spelled(name)}: passed to Megatron unchanged; never run here"
