"""Flags of the rl_kernel section: which operators training runs, and how closely trainer and engine are compared."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import flag

OPERATORS = ("linear_logp", "linear_token_loss", "logp", "ratio_kl", "grpo_loss", "group_advantage")
"""What --rl-kernel-ops may name. The masked reductions go with group_advantage."""


@dataclass(frozen=True)
class KernelsConfig:
    """The switch. slime.operators makes decisions of it, one an operator."""

    rlk_fast: str | None = flag(
        None,
        "off: logits from Megatron's output layer and plain PyTorch; auto (the default): operators of rl_kernel where "
        "their contract holds; strict: an error where it does not",
        choices=("off", "auto", "strict"),
    )
    enable_rl_kernel: bool = flag(False, "the same as --rlk-fast auto")
    rl_kernel_strict: bool = flag(False, "the same as --rlk-fast strict")
    rl_kernel_ops: list[str] | None = flag(
        None, f"the operators that may be used, with commas (default: all of {', '.join(OPERATORS)})"
    )
    rlk_consistency: str = flag(
        "off",
        "compare the trainer's log-probs with the engine's: audit reports, strict also ends the run",
        choices=("off", "audit", "strict"),
    )
