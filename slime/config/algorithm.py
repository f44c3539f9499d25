"""Flags of the algorithm section, and their rules: advantages, policy loss, KL and entropy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.algo.estimators import ESTIMATORS, estimator_of
from slime.algo.losses import LOSSES, loss_of
from slime.config.fields import flag, spelled
from slime.config.ranges import BOUND, COEFFICIENT, COUNT, UNIT

if TYPE_CHECKING:
    from slime.config.schema import Config

GROUP_MAKERS = (
    "custom_generate_function_path",
    "rollout_function_path",
    "data_source_path",
    "load_debug_rollout_data",
)


@dataclass(frozen=True)
class AlgorithmConfig:
    """The objective. Formulas are in slime/algo and rl_kernel."""

    advantage_estimator: str = flag("grpo", "how advantages are computed", choices=ESTIMATORS)
    loss_type: str = flag("policy_loss", "training loss", choices=LOSSES)
    custom_loss_function_path: str | None = flag(
        None, "fn(args, batch, logits, sum_of_sample_mean), for custom_loss"
    )
    custom_advantage_function_path: str | None = flag(None, "fn(args, rollout_data), in place")
    custom_pg_loss_reducer_function_path: str | None = flag(
        None, "fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> callable"
    )
    eps_clip: float = flag(0.2, "lower clip range: the ratio is clipped at 1 - this", range=BOUND)
    eps_clip_high: float | None = flag(
        None, "upper clip range: the ratio is clipped at 1 + this (default: --eps-clip)", range=BOUND
    )
    eps_clip_c: float | None = flag(
        None, "dual clip for negative advantages: upper bound of the ratio, above 1", range=BOUND
    )
    kl_coef: float = flag(0.0, "weight of the KL penalty in the reward", range=COEFFICIENT)
    use_kl_loss: bool = flag(False, "report the KL to the reference model and add it to the loss")
    kl_loss_coef: float = flag(0.0, "weight of the KL in the loss", range=COEFFICIENT)
    kl_loss_type: str = flag("k1", "KL estimator", choices=("k1", "k2", "k3", "low_var_kl"))
    use_unbiased_kl: bool = flag(False, "multiply the KL estimate by exp(log_probs - old_log_probs)")
    ref_update_interval: int | None = flag(
        None, "number of rollouts between two copies of the policy into the reference model", range=COUNT
    )
    entropy_coef: float = flag(0.0, "weight of the entropy bonus", range=COEFFICIENT)
    gamma: float = flag(1.0, "discount factor", range=UNIT)
    normalize_advantages: bool = flag(False, "whiten the advantages over all data parallel ranks")
    disable_grpo_std_normalization: bool = flag(
        False, "do not divide the advantages of a group by their standard deviation"
    )
    disable_rewards_normalization: bool = flag(
        False, "use the rewards as advantages, without normalization in the group"
    )
    calculate_per_token_loss: bool = flag(False, "average the loss over all tokens instead of over samples")
    disable_compute_advantages_and_returns: bool = flag(
        False, "compute no advantages (for supervised training and custom losses)"
    )
    enable_mtp_training: bool = flag(
        False, "train the model's layers of multi-token prediction, which engines draft with"
    )
    mtp_loss_scaling_factor: float = flag(
        0.2, "weight of the loss of --enable-mtp-training", range=COEFFICIENT
    )


def check_algorithm(c: Config) -> None:
    """An estimator and a loss that this version has, with what they need."""
    estimator = estimator_of(c.algorithm)
    if estimator.needs_values:
        raise ValueError(
            f"--advantage-estimator must not be {estimator.name}, got {estimator.name}; it needs a critic, not "
            "supported yet: use grpo"
        )
    for check in (*estimator.checks, *loss_of(c.algorithm).checks):
        check(c)
    if c.algorithm.eps_clip_c is not None and c.algorithm.eps_clip_c <= 1:
        raise ValueError(f"--eps-clip-c must be above 1, got {c.algorithm.eps_clip_c}")
    if c.algorithm.eps_clip >= 1:
        raise ValueError(f"--eps-clip must be below 1, got {c.algorithm.eps_clip}")


def compares_alone(c: Config) -> bool:
    """Whether a reward is compared with its group and --n-samples-per-prompt makes groups of one: advantages of 0."""
    hooks = (
        c.reward.custom_reward_post_process_path,
        c.reward.custom_convert_samples_to_train_data_path,
        c.algorithm.custom_advantage_function_path,
    )
    compares = (
        estimator_of(c.algorithm).centred and not c.algorithm.disable_rewards_normalization and not any(hooks)
    )
    trains = loss_of(c.algorithm).surrogate and not c.debug.debug_rollout_only
    return trains and compares and c.data.n_samples_per_prompt == 1


def makes_groups(c: Config) -> str | None:
    """The flag that may give a group more samples than --n-samples-per-prompt says, as typed: a user's function that
    fans out or groups by itself, or saved samples. None when there is none."""
    for name in GROUP_MAKERS:
        path = c.value_of(name)
        if path and not path.startswith(
            "slime."
        ):  # ours, also under slime's own import paths, make groups as told
            return f"{spelled(name)} {path}"
    return None


def check_group_size(c: Config) -> None:
    """Something to compare a reward with; where only the user's code can tell, `resolve` leaves a note instead."""
    if compares_alone(c) and makes_groups(c) is None:
        raise ValueError(
            "--n-samples-per-prompt must be above 1 with --advantage-estimator "
            f"{c.algorithm.advantage_estimator}, got 1; a "
            "reward counts relative to its group, and alone it is 0: raise it, or use --disable-rewards-normalization"
        )


def check_kl(c: Config) -> None:
    """One KL, in the reward or in the loss, where the loss has one."""
    for name in ("kl_coef", "kl_loss_coef"):
        if not loss_of(c.algorithm).rewarded and c.value_of(name) != 0:
            raise ValueError(
                f"{spelled(name)} must be 0 with --loss-type {c.algorithm.loss_type}, got "
                f"{c.value_of(name)}; supervised "
                "training has no KL to a reference: leave it out"
            )
    if c.algorithm.kl_coef != 0 and c.algorithm.kl_loss_coef != 0:
        raise ValueError(
            f"--kl-coef and --kl-loss-coef must not both be set, got {c.algorithm.kl_coef} and "
            f"{c.algorithm.kl_loss_coef}; "
            "the KL belongs either in the reward or in the loss"
        )
    if c.algorithm.kl_loss_coef != 0 and not c.algorithm.use_kl_loss:
        raise ValueError(
            f"--use-kl-loss must be given with --kl-loss-coef, got only --kl-loss-coef {c.algorithm.kl_loss_coef}"
        )
