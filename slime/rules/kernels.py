"""Rules of the rl_kernel switch."""

from __future__ import annotations

from slime.algo.losses import loss_of
from slime.config.fields import nearest
from slime.config.problems import given
from slime.config.schema import Config
from slime.config.sections.kernels import OPERATORS


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
