"""The columns and passes that the loss and the estimator of a configuration need. Must start without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.algo.estimators import estimator_for, surrogate_for
from slime.algo.flags import reads_kl_in_reward
from slime.algo.losses import loss_for

if TYPE_CHECKING:
    from slime.config.schema import Config


def columns_read(c: Config) -> frozenset[str]:
    """Returns the columns that loss, estimator and hooks read, and that must exist before the first optimizer step.

    The records of loss, estimator and surrogate declare most columns. The flags of a KL add columns, and a hook for
    advantages may read old log-probs.
    """
    loss, estimator = loss_for(c.algorithm), estimator_for(c.algorithm)
    if not loss.rewarded:
        return loss.reads
    flags = {
        "ref_log_probs": c.algorithm.use_kl_loss or reads_kl_in_reward(c),
        "teacher_log_probs": c.distillation.use_opd,
        **dict.fromkeys(("teacher_top_ids", "teacher_top_log_probs"), draws_in_loss(c)),
        "old_log_probs": (
            reads_kl_in_reward(c)
            or (c.distillation.use_opd and not draws_in_loss(c))
            or c.off_policy.get_mismatch_metrics
            or c.algorithm.custom_advantage_function_path is not None
            # Routing replay repeats the experts of the extra pass, unless it repeats the experts of the engine.
            or (c.off_policy.use_routing_replay and not c.off_policy.use_rollout_routing_replay)
        ),
    }
    of_surrogate = surrogate_for(c.algorithm).reads if loss.surrogate else frozenset[str]()
    return loss.reads | estimator.reads | of_surrogate | {name for name, on in flags.items() if on}


def draws_in_loss(c: Config) -> bool:
    """Returns true if the loss has a divergence to a teacher, over the teacher's likeliest ids."""
    return c.distillation.use_opd and c.distillation.opd_loss_type != "reverse_kl"


def ids_read(c: Config) -> str | None:
    """Returns the name of the column with ids [R, K] whose log-probs the loss reads, or None if the loss reads no
    ids."""
    if not loss_for(c.algorithm).surrogate:
        return None
    names = ("teacher_top_ids", "rollout_top_ids")
    return next((name for name in names if name in columns_read(c)), None)


def read_by_advantages(c: Config) -> frozenset[str]:
    """Returns the part of `columns_read` from which advantages and returns are made. A hook may read all columns."""
    read, algorithm = columns_read(c), c.algorithm
    if not loss_for(algorithm).rewarded or algorithm.custom_advantage_function_path:
        return read
    flags = {
        "ref_log_probs": reads_kl_in_reward(c),
        "old_log_probs": reads_kl_in_reward(c) or c.distillation.use_opd,
        "teacher_log_probs": c.distillation.use_opd,
    }
    of_surrogate = surrogate_for(algorithm).reads if loss_for(algorithm).surrogate else frozenset[str]()
    return read & (estimator_for(algorithm).reads | of_surrogate | {name for name, on in flags.items() if on})


def needs_sampled_log_probs(c: Config) -> bool:
    """Returns true if training needs the engine's `rollout_log_probs`: for a correction, for the audit, or because
    older weights may have sampled a response. Otherwise the trainer's old log-probs are those of the policy that
    sampled."""
    wanted = c.off_policy
    return bool(
        wanted.use_rollout_logprobs
        or wanted.use_tis
        or wanted.use_rs
        or wanted.get_mismatch_metrics
        or wanted.custom_tis_function_path
        or c.kernels.rlk_consistency != "off"
        or c.rollout.max_staleness
        or c.rollout.partial_rollout
    )


def drops_inputs(c: Config) -> bool:
    """Returns true if a training pass uses dropout. The log-probs of the pass then differ from those of the engines."""
    return bool(c.lora.lora_rank and c.lora.lora_dropout)


def needs_old_log_probs(c: Config) -> bool:
    """Returns true if an extra pass computes log-probs of the old policy before the first step. The pass covers all
    samples if `before_first_step`, else the samples of later steps."""
    if not loss_for(c.algorithm).rewarded:
        return False
    if c.off_policy.use_rollout_logprobs:
        return drops_inputs(c) and c.kernels.rlk_consistency != "off"  # only the audit compares them
    steps = c.data.num_steps_per_rollout
    return steps != 1 or before_first_step(c, steps)


def before_first_step(c: Config, steps: int | None) -> bool:
    """Returns true if all samples' old log-probs must exist before the first of the rollout's `steps`, for
    example for a KL penalty in the reward, for hooks or for sequence ratios.

    Otherwise the first step needs no extra pass: it trains the old policy, so its detached log-probs are the old
    log-probs. With several steps, the audit and a hook before the step also need the extra pass. With dropout, the
    log-probs of a training pass are never the old log-probs.
    """
    several = steps != 1
    # The audit compares samples of every step, and the hook may change the model.
    watched = c.kernels.rlk_consistency != "off" or bool(
        c.get_value("custom_megatron_before_train_step_hook_path")
    )
    return "old_log_probs" in columns_read(c) or drops_inputs(c) or (several and watched)
