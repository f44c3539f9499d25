"""Flags of the lora section: low-rank adapters that are trained instead of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import flag
from slime.config.ranges import COUNT_OR_ZERO, DECAY, STEEPNESS


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adaptation (LoRA, 2106.09685). The base weights do not change."""

    lora_rank: int = flag(
        0, "train adapters of this rank in place of the weights (0: train the weights)", range=COUNT_OR_ZERO
    )
    lora_alpha: float = flag(
        32.0, "the product of an adapter is multiplied by --lora-alpha / --lora-rank", range=STEEPNESS
    )
    lora_dropout: float = flag(0.0, "dropout of an adapter's input in training", range=DECAY)
    target_modules: list[str] | None = flag(  # noqa: RUF009
        None,
        "the last parts of the Hugging Face names of modules that get an adapter, such as q_proj v_proj (default: "
        "all-linear, every product of a layer but routers)",
        commas=True,
    )
    lora_target_modules: list[str] | None = flag(  # noqa: RUF009
        None, "another name of --target-modules", commas=True
    )
    exclude_modules: list[str] | None = flag(  # noqa: RUF009
        None,
        "modules that get no adapter, named like --target-modules or by their whole names, such as "
        "model.layers.0.self_attn.q_proj",
        commas=True,
    )
    lora_load: str | None = flag(
        None,
        "folder of a PEFT adapter to start from; it gives --lora-rank, --lora-alpha, --target-modules and "
        "--exclude-modules",
    )
    lora_merge: bool = flag(
        False,
        "send whole weights with the adapters merged in to the engines, in place of the adapters alone",
    )
    lora_name: str = flag("policy-lora", "name of the adapter in the engines")
    lora_adapter_name: str | None = flag(None, "another name of --lora-name")
