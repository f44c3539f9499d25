"""Defines the rules of advantages, policy loss, KL and the size of a group."""

from __future__ import annotations

from collections.abc import Iterator

from slime.algo.estimators import estimator_for, surrogate_for
from slime.algo.flags import unread
from slime.algo.losses import loss_for
from slime.config.fields import get_specs, spelled
from slime.config.problems import Problems
from slime.config.schema import Config
from slime.config.sections.algorithm import AlgorithmConfig
from slime.config.sections.critic import CriticConfig
from slime.config.sections.off_policy import OffPolicyConfig
from slime.records.errors import FlagError
from slime.roles import CRITIC, get_roles
from slime.rules.flags import FALLBACKS

GROUP_MAKERS = (
    "custom_generate_function_path",
    "rollout_function_path",
    "data_source_path",
    "load_debug_rollout_data",
)


def check_algorithm(c: Config) -> None:
    """Checks that this version has the estimator and the loss, and that their requirements hold."""
    estimator = estimator_for(c.algorithm)
    loss = loss_for(c.algorithm)
    surrogate = surrogate_for(c.algorithm)
    asked = "--use-score-centering" if c.algorithm.use_score_centering else "--pg-loss-type"
    if (c.algorithm.pg_loss_type is not None or c.algorithm.use_score_centering) and not loss.surrogate:
        raise FlagError(
            asked,
            f"be left out with --loss-type {loss.name}",
            surrogate.name,
            "that loss has no policy-gradient term",
        )
    for check in (*estimator.checks, *loss.checks, *(surrogate.checks if loss.surrogate else ())):
        check(c)
    if c.algorithm.eps_clip_c is not None and c.algorithm.eps_clip_c <= 1:
        raise FlagError("--eps-clip-c", "be above 1", c.algorithm.eps_clip_c)


def check_critic(c: Config) -> None:
    """Checks the critic's flags: they need an estimator that reads values, and the training of values needs returns."""
    estimator, has_critic = c.algorithm.advantage_estimator, CRITIC in get_roles(c)
    for name, spec in get_specs(CriticConfig).items():
        value = c.get_value(name)
        if not has_critic and value not in (spec.default, c.megatron.lr if name == "critic_lr" else None):
            raise FlagError(
                spelled(name),
                f"be left out with --advantage-estimator {estimator}",
                value,
                "its advantages come from rewards alone, and nothing reads a critic's values: use "
                "--advantage-estimator ppo",
            )
    if has_critic and c.algorithm.disable_compute_advantages_and_returns:
        raise FlagError(
            "--disable-compute-advantages-and-returns",
            f"be left out with --advantage-estimator {estimator}",
            "both",
            "the critic is trained on the returns: leave it out",
        )


def check_loss_length(c: Config) -> None:
    """Checks the flags of Dr.GRPO's constant length, which replaces every other normalization."""
    a = c.algorithm
    if not a.use_dr_grpo:
        return
    if a.dr_grpo_length is None:
        raise FlagError(
            "--dr-grpo-length",
            "be given with --use-dr-grpo where there is no --rollout-max-response-len",
            "none",
            "set it to the longest response",
        )
    others = {
        "--calculate-per-token-loss": a.calculate_per_token_loss,
        "--custom-pg-loss-reducer-function-path": a.custom_pg_loss_reducer_function_path,
    }
    if other := next((flag for flag, value in others.items() if value), None):
        raise FlagError(
            "--use-dr-grpo", f"not be combined with {other}", "both", "each sets the divisor of the loss"
        )


def check_overlong(c: Config) -> None:
    """Checks DAPO's zone before the length limit, whose penalty is a part of the reward that slime computes."""
    zone, limit = c.reward.overlong_buffer_len, c.rollout.rollout_max_response_len
    asked = "--overlong-buffer-len" if zone is not None else "--use-overlong-filtering"
    if zone is None and not c.reward.use_overlong_filtering:
        return
    if not loss_for(c.algorithm).rewarded:
        raise FlagError(
            asked, f"be left out with --loss-type {c.algorithm.loss_type}", "both", "nothing is generated"
        )
    if zone is not None and (limit is None or zone > limit):
        raise FlagError(
            "--overlong-buffer-len",
            "be at most --rollout-max-response-len",
            f"{zone} and {limit}",
            "the zone ends at the limit",
        )
    hooks = {
        "--custom-reward-post-process-path": zone is not None and c.reward.custom_reward_post_process_path,
        "--custom-convert-samples-to-train-data-path": c.reward.custom_convert_samples_to_train_data_path,
    }
    if hook := next((flag for flag, path in hooks.items() if path), None):
        raise FlagError(asked, f"not be combined with {hook}", "both", "the function does that part itself")


def compares_alone(c: Config) -> bool:
    """Returns True if a reward is compared with its group although --n-samples-per-prompt makes groups with one sample,
    so advantages are 0."""
    hooks = (
        c.reward.custom_reward_post_process_path,
        c.reward.custom_convert_samples_to_train_data_path,
        c.algorithm.custom_advantage_function_path,
    )
    compares = (
        estimator_for(c.algorithm).centred
        and not c.algorithm.disable_rewards_normalization
        and not any(hooks)
    )
    trains = loss_for(c.algorithm).surrogate and not c.debug.debug_rollout_only
    if c.distillation.use_opd:  # the teacher's part of an advantage needs no group
        return False
    return trains and compares and c.data.n_samples_per_prompt == 1


def makes_groups(c: Config) -> str | None:
    """Returns the flag, as typed, that may give a group more samples than --n-samples-per-prompt, or None.

    Such a flag names a user's function that fans out or makes groups, or saved samples.
    """
    for name in GROUP_MAKERS:
        path = c.get_value(name)
        if path and not path.startswith("slime."):  # slime's own functions make groups of the given size
            return f"{spelled(name)} {path}"
    return None


def check_group_size(c: Config) -> None:
    """Checks that a reward has other rewards to compare with. If only the user's code decides this, `resolve` adds a
    note instead."""
    if compares_alone(c) and makes_groups(c) is None:
        raise FlagError(
            "--n-samples-per-prompt",
            f"be above 1 with --advantage-estimator {c.algorithm.advantage_estimator}",
            "1",
            "a reward counts relative to its group, and alone it is 0: raise it, or use "
            "--disable-rewards-normalization",
        )


def check_kl(c: Config) -> None:
    """Checks the KL: it is in the reward or in the loss, and only if the loss has one."""
    a = c.algorithm
    if not loss_for(a).rewarded and a.kl_loss_coef != 0:
        raise FlagError(
            "--kl-loss-coef",
            f"be 0 with --loss-type {a.loss_type}",
            a.kl_loss_coef,
            "this training has no KL in its loss: leave it out",
        )
    if c.algorithm.kl_coef != 0 and c.algorithm.kl_loss_coef != 0:
        raise FlagError(
            "--kl-coef and --kl-loss-coef",
            "not both be set",
            f"{c.algorithm.kl_coef} and {c.algorithm.kl_loss_coef}",
            "the KL belongs either in the reward or in the loss",
        )
    if a.kl_loss_coef != 0 and not a.use_kl_loss:
        raise FlagError(
            "--use-kl-loss",
            "be given with --kl-loss-coef",
            f"only --kl-loss-coef {a.kl_loss_coef}",
            "add it, or leave the coefficient out",
        )


IN_VAIN = frozenset(
    {
        "clip_cov_lb",
        "clip_cov_ratio",
        "clip_cov_ub",
        "custom_loss_function_path",
        "dpo_beta",
        "dpo_label_smoothing",
        "dr_grpo_length",
        "entropy_coef",
        "eps_clip_c",
        "gamma",
        "kl_coef",
        "kl_cov_coef",
        "kl_cov_ratio",
        "pass_at_k",
        "rs_veto_threshold",
        "sapo_tau_neg",
        "sapo_tau_pos",
        "use_unbiased_kl",
    }
)
"""Flags of the objective that are an error if nothing reads them, because a run would train on another objective than
its command line names.

The other flags of `slime.algo.flags.ALL` get a note, because scripts keep them when a switch is off.
"""


def get_default(name: str) -> object:
    return {**get_specs(AlgorithmConfig), **get_specs(OffPolicyConfig)}[name].default


def find_set_flags(c: Config) -> frozenset[str]:
    """Returns the fields of the objective whose value is not their default. A value that another flag gave counts as
    not given."""
    found = set()
    for name in (*get_specs(AlgorithmConfig), *get_specs(OffPolicyConfig)):
        value, source = c.get_value(name), FALLBACKS.get(name)
        if value not in (get_default(name), None) and not (source and value == c.get_value(source)):
            found.add(name)
    if c.algorithm.use_dr_grpo:  # the switch itself set them
        found -= {"disable_grpo_std_normalization", "dr_grpo_length"}
    return frozenset(found)


def check_unread(c: Config) -> None:
    """Checks that every given weight, bound or term of the objective is read."""
    problems = Problems()
    for flag in unread(c, find_set_flags(c) & IN_VAIN):
        value, name = c.get_value(flag.name), spelled(flag.name)
        if flag.switches:
            needed = " or ".join(map(spelled, flag.switches))
            problems.add(
                FlagError(needed, f"be given with {name}", f"only {value}", f"add it, or leave {name} out")
            )
            continue
        rule = "be 0" if get_default(flag.name) == 0 else "be left out"
        problems.add(FlagError(name, f"{rule} {flag.because}", value, f"leave it out: {name} {flag.instead}"))
    problems.report()


def unread_notes(c: Config) -> Iterator[str]:
    """Yields notes on the other flags that nothing reads. Yields nothing for values that the rules refuse."""
    try:
        found = list(unread(c, find_set_flags(c) - IN_VAIN))
    except ValueError:
        return
    for flag in found:
        value = c.get_value(flag.name)
        shown = spelled(flag.name) if value is True else f"{spelled(flag.name)} {value}"
        reason = _REASONS.get(flag.name, f"it {flag.instead}")
        yield f"{shown} has no effect {flag.because}: {reason}"


_REASONS = {"use_kl_loss": "there is no KL in this loss"}


RULES = (
    check_algorithm,
    check_critic,
    check_group_size,
    check_kl,
    check_unread,
    check_loss_length,
    check_overlong,
)
