"""This module computes the figures that show whether a rollout can train the policy. `slime.tracking.concerns` checks
them.

The figures are not metrics: --custom-rollout-log-function-path may replace the metrics, but not these figures.
"""

from __future__ import annotations

import statistics

from slime.algo.estimators import estimator_for
from slime.algo.losses import loss_for
from slime.config.schema import Config
from slime.data.agents.session_record import failures
from slime.data.trajectories import trajectories, trajectory_rewards, truncated_trajectories
from slime.tracking.samples import read_reward_number
from slime.types import Sample, SampleGroup


def learning_texts(groups: list[SampleGroup]) -> dict[str, str]:
    """Returns `session_ends`, the reasons why sessions failed, or an empty dict if no session failed."""
    found = failures([sample for group in groups for sample in group])
    return {} if found is None else {"session_ends": found[1]}


def learning_figures(c: Config, groups: list[SampleGroup]) -> dict[str, float]:
    """Returns `untrained`, the share of samples without a trained token, and further figures.

    With sessions, it adds failed_sessions, the share of sessions without a trained token. With rewards, it adds
    truncated, the share of truncated responses; reward_mean and reward_range (largest minus smallest); text_labels,
    which is 1 if each label is a text; and without_spread, the share of groups whose rewards are equal. If a reward
    does not count relative to its group, the whole rollout counts as one group.
    """
    samples = [sample for group in groups for sample in group]
    if not samples:
        return {}
    figures = {"untrained": statistics.fmean(map(_is_untrained, samples))}
    if (failed := failures(samples)) is not None:
        figures["failed_sessions"] = failed[0]
    if not loss_for(c.algorithm).rewarded:
        return figures
    figures["truncated"] = statistics.fmean(truncated_trajectories(samples))
    if c.distillation.use_opd:  # the teacher's log-probs train the policy, not the rewards
        return figures
    key = c.reward.reward_key
    rewards = trajectory_rewards(samples, key)
    figures |= {"reward_mean": statistics.fmean(rewards), "reward_range": max(rewards) - min(rewards)}
    if all(isinstance(sample.label, str) for sample in samples):
        figures["text_labels"] = 1.0
    if _rewards_decide(c) and len(rewards) > 1:
        compared = [rewards]
        if estimator_for(c.algorithm).centred and not c.algorithm.disable_rewards_normalization:
            compared = [trajectory_rewards(group, key) for group in groups]
        figures["without_spread"] = statistics.fmean(max(each) == min(each) for each in compared)
    return figures


def spread(group: SampleGroup, reward_key: str | None) -> float:
    """Returns the standard deviation of the rewards of a group's trajectories, 0 with fewer than two numbers."""
    rewards = []
    for parts in trajectories(group):
        numbers = [read_reward_number(sample.reward, reward_key) for sample in parts]
        if known := [number for number in numbers if number is not None]:
            rewards.append(statistics.fmean(known))
    return statistics.pstdev(rewards) if rewards else 0.0


def _is_untrained(sample: Sample) -> bool:
    if sample.remove_sample:
        return True
    return not any(sample.loss_mask) if sample.loss_mask is not None else sample.response_length == 0


def _rewards_decide(c: Config) -> bool:
    """Returns True if only the samples' rewards determine the advantages, without a user's function or turn rewards."""
    hooks = (
        c.reward.custom_reward_post_process_path,
        c.reward.custom_convert_samples_to_train_data_path,
        c.algorithm.custom_advantage_function_path,
    )
    return not any(hooks) and "turn_advantages" not in estimator_for(c.algorithm).reads
