"""Flags of the rl_kernel section: the operators of training, and the comparison of trainer and engine."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import flag
from slime.config.ranges import COUNT

OPERATORS = (
    "linear_logp",
    "linear_token_loss",
    "logp",
    "ratio_kl",
    "grpo_loss",
    "swiglu",
    "rotary",
    "expert_dispatch",
    "expert_combine",
    "group_advantage",
)
"""The values of --rl-kernel-ops. group_advantage also selects the masked reductions."""

BITWISE_OPERATORS = ("product", "norm", "activation", "rotary", "attention", "head")
"""Values of --rlk-bitwise-operators, in the order in which a token passes them first."""


@dataclass(frozen=True)
class KernelsConfig:
    """Chooses the operators. slime.operators makes one decision per operator from these flags."""

    rlk_fast: str = flag(
        None,
        "off: Megatron's output layer over float32 logits, and plain PyTorch. auto (the default): Triton "
        "kernels of rl_kernel; if a kernel cannot run, its PyTorch reference, counted as a fallback. "
        "strict: if a kernel cannot run, an error",
        choices=("off", "auto", "strict"),
    )
    enable_rl_kernel: bool = flag(False, "the same as --rlk-fast auto")
    rl_kernel_strict: bool = flag(False, "the same as --rlk-fast strict")
    rl_kernel_ops: list[str] = flag(  # noqa: RUF009
        None,
        "operators that may run, separated by commas (default: all): linear_logp, linear_token_loss, "
        "logp, ratio_kl, grpo_loss, swiglu, rotary, expert_dispatch, expert_combine, group_advantage",
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
    rlk_bitwise: bool = flag(
        False,
        "the same operators, rl_kernel.invariant, in trainer and engine: with --rlk-consistency strict, the run ends "
        "at the first log-prob whose bits differ",
    )
    rlk_bitwise_operators: list[str] = flag(  # noqa: RUF009
        None,
        "which of them, separated by commas (default: all): product, norm, activation, rotary, attention, head. Fewer "
        "show what each is worth, with --rlk-consistency audit",
    )
    rlk_fp8_products: str = flag(
        "torch",
        "library that multiplies for --fp8-recipe blockwise on Hopper GPUs. torch: cuBLAS, and Triton for experts. "
        "deepgemm: the package sgl-deep-gemm, which compiles with nvcc at the first step; the weights' gradients are "
        "added to Megatron's float32 buffers unrounded",
        choices=("torch", "deepgemm"),
    )
    selected_logprob_provider: str | None = flag(
        None,
        "import path of `fn(request) -> result`, which computes log-probs and entropy in place of the trainer",
    )
    selected_logprob_provider_mode: str = flag(
        "auto",
        "auto: the trainer's own log-probs where the provider cannot be imported or reports that it is unavailable; "
        "strict: that is an error, and so is a result without identity or gradient",
        choices=("auto", "strict"),
    )
