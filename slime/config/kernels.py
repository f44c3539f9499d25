"""Flags of the rl_kernel section: the operators of training, and the comparison of trainer and engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.algo.losses import loss_of
from slime.config.fields import flag, nearest
from slime.config.problems import given
from slime.config.ranges import COUNT

if TYPE_CHECKING:
    from slime.config.schema import Config

OPERATORS = (
    "linear_logp",
    "linear_token_loss",
    "logp",
    "ratio_kl",
    "grpo_loss",
    "swiglu",
    "rotary",
    "group_advantage",
)
"""The values of --rl-kernel-ops. group_advantage also selects the masked reductions."""


@dataclass(frozen=True)
class KernelsConfig:
    """The switch. slime.operators makes one decision per operator from it."""

    rlk_fast: str | None = flag(
        None,
        "off: Megatron's output layer over float32 logits, and plain PyTorch. auto (the default): Triton "
        "kernels of rl_kernel; if a kernel cannot run, its PyTorch reference, counted as a fallback. "
        "strict: if a kernel cannot run, an error",
        choices=("off", "auto", "strict"),
    )
    enable_rl_kernel: bool = flag(False, "the same as --rlk-fast auto")
    rl_kernel_strict: bool = flag(False, "the same as --rlk-fast strict")
    rl_kernel_ops: list[str] | None = flag(  # noqa: RUF009
        None,
        "operators that may run, separated by commas (default: all): linear_logp, linear_token_loss, "
        "logp, ratio_kl, grpo_loss, swiglu, rotary, group_advantage",
    )
    rl_kernel_workspace_mib: int = flag(
        1536,
        "memory per GPU, in MiB, for intermediate results of linear_logp and linear_token_loss; less is "
        "slower",
        range=COUNT,
    )
    rlk_consistency: str = flag(
        "off",
        "compare the log-probs of trainer and engine. audit: report the difference; strict: also end the "
        "run if it is too large",
        choices=("off", "audit", "strict"),
    )


def check_kernels(c: Config) -> None:
    """Operators must be known, and flags must not contradict each other."""
    unknown = [name for name in given(c.kernels.rl_kernel_ops) if name not in OPERATORS]
    if unknown:
        raise ValueError(
            f"--rl-kernel-ops must name operators of {', '.join(OPERATORS)}, got {unknown[0]}"
            f"{nearest(unknown[0], OPERATORS, prefix='')}"
        )
    if c.kernels.rl_kernel_strict and c.kernels.rlk_fast != "strict":
        raise ValueError(
            f"--rl-kernel-strict must not stand beside --rlk-fast {c.kernels.rlk_fast}; leave one out"
        )
    if c.kernels.enable_rl_kernel and c.kernels.rlk_fast == "off":
        raise ValueError("--enable-rl-kernel must not stand beside --rlk-fast off; leave one out")
    if c.kernels.rlk_consistency != "off" and (
        not loss_of(c.algorithm).rewarded or c.debug.debug_rollout_only
    ):
        what = (
            "--debug-rollout-only"
            if loss_of(c.algorithm).rewarded
            else f"--loss-type {c.algorithm.loss_type}"
        )
        raise ValueError(
            f"--rlk-consistency must be off with {what}, got {c.kernels.rlk_consistency}; it compares "
            "log-probs of a trainer "
            "and an engine"
        )
