"""Turns the samples of a rollout into the columns of train data: reward normalization, conversion, and the split over
data-parallel ranks. Runs in the rollout manager, without model and engine.

Shapes: a rollout has S samples, and a sample has R response tokens and L prompt + response tokens.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

import rl_kernel
from slime.algo.estimators import estimator_for
from slime.algo.losses import loss_for
from slime.algo.needs import needs_sampled_log_probs
from slime.config.hook_calls import Hooks
from slime.config.schema import Config
from slime.data import kept_tokens, routed_experts, top_tokens
from slime.data.agents.turn_rewards import turn_advantages
from slime.data.columns import COLUMNS, Column, present
from slime.data.packing import Schedule, plan_steps
from slime.data.rank_data import RankData
from slime.data.siblings import plan_held_out, plan_together
from slime.data.trajectories import Key, trajectory_keys
from slime.models.decoder import Hf
from slime.records.once import warn_once
from slime.types import Sample, TrainData

logger = logging.getLogger(__name__)


def post_process_rewards(
    config: Config, hooks: Hooks, samples: list[Sample]
) -> tuple[list[float], list[float]]:
    """Returns raw rewards and the rewards to train on. --custom-reward-post-process-path makes both instead.

    Maths: `(r - r[group].mean()) / (r[group].std() + 1e-6)` if the estimator's record has `group="mean and std"`;
    without the division for "mean" or --disable-grpo-std-normalization; `r` for "none" or
    --disable-rewards-normalization. `r` is the raw reward plus the sample's `overlong_penalty`. The group is
    `Sample.group_index`. Siblings with the same `rollout_id` count once.
    """
    if config.reward.custom_reward_post_process_path:
        raw, rewards = hooks.call("custom_reward_post_process_path", samples)
        return raw, rewards
    raw = [sample.reward_value(config.reward.reward_key) for sample in samples]
    shaped = [reward + overlong_penalty(config, sample) for reward, sample in zip(raw, samples, strict=True)]
    estimator = estimator_for(config.algorithm)
    if not estimator.centred or config.algorithm.disable_rewards_normalization:
        return raw, shaped
    group_number: dict[int, int] = {}
    group_ids = [group_number.setdefault(_group_key(sample), len(group_number)) for sample in samples]
    rollout_number: dict[Key, int] = {}
    rollout_ids = [rollout_number.setdefault(key, len(rollout_number)) for key in trajectory_keys(samples)]
    normalised = rl_kernel.group_advantage(
        torch.tensor(shaped, dtype=torch.float32),
        torch.tensor(group_ids),
        rollout_ids=torch.tensor(rollout_ids),
        normalize_std=estimator.group == "mean and std"
        and not config.algorithm.disable_grpo_std_normalization,
    )
    return raw, normalised.tolist()


def overlong_penalty(config: Config, sample: Sample) -> float:
    """Returns DAPO's soft overlong punishment (2503.14476, equation 13) times --overlong-penalty-factor. Returns 0
    without --overlong-buffer-len.

    The punishment is `((limit - zone) - length) / zone` between `limit - zone` and `limit`, 0 below and -1 above.
    `length` is the number of response tokens, `limit` is --rollout-max-response-len, and `zone` is
    --overlong-buffer-len.
    """
    zone, limit = config.reward.overlong_buffer_len, config.rollout.rollout_max_response_len
    if zone is None or limit is None:
        return 0.0
    beyond = sample.response_length - (limit - zone)
    return -config.reward.overlong_penalty_factor * min(max(beyond / zone, 0.0), 1.0)


def group_rewards(samples: list[Sample], raw: list[float]) -> list[list[float]]:
    """Returns for each sample the rewards of its group: first the reward of the sample's rollout, then the rewards of
    the other rollouts in the order of the samples. Siblings count once, with their mean."""
    of_rollout: dict[Key, list[float]] = defaultdict(list)
    for key, reward in zip(trajectory_keys(samples), raw, strict=True):
        of_rollout[key].append(reward)
    of_group: dict[int, dict[Key, float]] = defaultdict(dict)
    for key, sample in zip(trajectory_keys(samples), samples, strict=True):
        of_group[_group_key(sample)][key] = sum(of_rollout[key]) / len(of_rollout[key])
    found = []
    for key, sample in zip(trajectory_keys(samples), samples, strict=True):
        rollouts = of_group[_group_key(sample)]
        found.append([rollouts[key], *(reward for other, reward in rollouts.items() if other != key)])
    return found


def _group_key(sample: Sample) -> int:
    if sample.group_index is None:
        raise ValueError(
            f"group_index must be set on every sample, got None for sample {sample.index}; "
            "a data source has to number its groups"
        )
    return sample.group_index


def convert_samples_to_train_data(config: Config, hooks: Hooks, samples: list[Sample]) -> TrainData:
    """Makes one column per field with one entry per sample (SLIME contract 2b), and checks every sample.
    --custom-convert-samples-to-train-data-path makes all columns instead.

    A missing loss mask becomes ones. `remove_sample` sets the mask to zeros, and so does --use-overlong-filtering for a
    truncated sample (DAPO, 2503.14476, section 3.4). `rollout_mask_sums[i]` is the number of trained tokens over all
    siblings of sample i. A rollout with several samples then has the weight of a rollout with one sample.

    Example:
        data = convert_samples_to_train_data(config, Hooks(config), samples)
        data["tokens"][0], data["rewards"][0], data["loss_masks"][0]     # the entries of sample 0

    """
    if config.reward.custom_convert_samples_to_train_data_path:
        made: TrainData = hooks.call("custom_convert_samples_to_train_data_path", samples)
        return made
    check_samples(config, samples)
    on_policy = loss_for(config.algorithm).rewarded
    raw, rewards = [0.0] * len(samples), [0.0] * len(samples)
    if on_policy:
        raw, rewards = post_process_rewards(config, hooks, samples)
    data: TrainData = {"rewards": rewards, "raw_reward": raw}
    if on_policy:
        data |= _for_estimator(config, samples, raw)
    for column in COLUMNS.values():
        if column.origin == "sample" and column.on(config):
            values = column.read_samples(samples)
            if values is not None:
                data[column.name] = values
    if on_policy and config.reward.use_overlong_filtering:
        data["loss_masks"] = [
            [0] * len(mask) if cut else mask
            for mask, cut in zip(data["loss_masks"], data["truncated"], strict=True)
        ]
    if kept_tokens.COLUMN in data:
        data[kept_tokens.COLUMN] = kept_tokens.same_width(data[kept_tokens.COLUMN])
    top_tokens.same_width(data)
    keys = trajectory_keys(samples)
    mask_sums: dict[Key, int] = defaultdict(int)
    for key, mask in zip(keys, data["loss_masks"], strict=True):
        mask_sums[key] += sum(mask)
    number: dict[Key, int] = {}
    data["rollout_ids"] = [number.setdefault(key, len(number)) for key in keys]
    data["rollout_mask_sums"] = [float(mask_sums[key]) for key in keys]
    return data


def check_samples(config: Config, samples: list[Sample]) -> None:
    """Calls `Sample.check` for each sample that becomes train data. With a conversion hook, the hook checks the
    samples.

    Some generate functions of slime fill no log-probs of the engine. All samples may lack them if training does not
    need them (`needs_sampled_log_probs`). Raises ValueError if only a part of the samples lacks them.
    """
    if config.reward.custom_convert_samples_to_train_data_path:
        return
    on_policy = loss_for(config.algorithm).rewarded
    sampled = on_policy and (
        needs_sampled_log_probs(config) or any(sample.rollout_log_probs is not None for sample in samples)
    )
    for sample in samples:
        sample.check(require_log_probs=sampled, require_experts=config.off_policy.use_rollout_routing_replay)
    if on_policy and not sampled:
        warn_once(
            logger,
            "rollout_log_probs",
            "the generate function fills no rollout_log_probs: this run cannot compare the engine's log-probs with the "
            "trainer's; take them from the engine's answer",
        )


def _for_estimator(config: Config, samples: list[Sample], raw: list[float]) -> TrainData:
    """Returns the columns of a batch that only the run's estimator reads."""
    reads = estimator_for(config.algorithm).reads
    data: TrainData = {}
    if "group_rewards" in reads:
        shaped = [r + overlong_penalty(config, sample) for r, sample in zip(raw, samples, strict=True)]
        data["group_rewards"] = group_rewards(samples, shaped)
    if "turn_advantages" in reads:
        data["turn_advantages"] = turn_advantages(
            samples,
            centred=not config.algorithm.disable_rewards_normalization,
            normalize_std=not config.algorithm.disable_grpo_std_normalization,
        )
    return data


def split_by_dp(data: TrainData, schedule: Schedule) -> list[RankData]:
    """Returns the part of `data` for each data-parallel rank, as tensors, with the rank's micro-batch schedule.

    `micro_batch_indices` of a rank counts from 0 within that rank's samples; `num_microbatches`,
    `global_batch_sizes` (rollouts) and `global_token_counts` (Σ max(trained tokens, 1)) have one entry per
    optimizer step.
    """
    columns = {c.name: _split_ready(data, c) for c in present(data) if c.stage == "sent"}
    masks = cast("Sequence[torch.Tensor]", columns["loss_masks"])
    trained = [max(int(mask.sum()), 1) for mask in masks]
    token_counts = [sum(trained[i] for i in step) for step in schedule.step_samples]
    ranks = []
    for rank_steps in schedule.ranks:
        partition = [index for step in rank_steps for bin_ in step for index in bin_]
        part = RankData(partition=partition)
        for name, values in columns.items():
            part[name] = [values[i] for i in partition]
        bins = [bin_ for step in rank_steps for bin_ in step]
        starts = [sum(len(b) for b in bins[:k]) for k in range(len(bins))]
        part["micro_batch_indices"] = [
            list(range(start, start + len(bin_))) for start, bin_ in zip(starts, bins, strict=True)
        ]
        part["num_microbatches"] = [len(step) for step in rank_steps]
        part["global_batch_sizes"] = schedule.global_batch_sizes
        part["global_token_counts"] = token_counts
        ranks.append(part)
    return ranks


def _split_ready(data: TrainData, column: Column) -> Sequence[object]:
    """Returns a column in the form for the ranks: host tensors, or the plain values of a column of kind sample."""
    values = data[column.name]
    if column.to_tensor is not None:
        return [column.to_tensor(value) for value in values]
    if column.dtype is not None:
        return _host_tensors(values, column.name, column.dtype)
    plain: Sequence[object] = values
    return plain


def _host_tensors(column: Sequence[object], name: str, dtype: type[np.generic]) -> list[torch.Tensor]:
    """Returns a column as tensors, from lists, arrays or tensors of numbers. Raises ValueError for other values."""
    tensors = []
    for index, values in enumerate(column):
        if isinstance(values, torch.Tensor):  # numpy has no bfloat16 and reads no other device
            values = values.tolist()
        found = np.array(values)  # three times as fast as torch.tensor for a list
        if found.ndim != 1 or found.dtype.kind not in "biuf":
            raise ValueError(
                f"{name} must be a list of numbers for every sample, got {str(values)[:80]} at index {index}; "
                "a conversion hook has to fill it"
            )
        tensors.append(torch.from_numpy(found.astype(dtype, copy=False)))
    return tensors


def make_rank_data(
    config: Config, hooks: Hooks, samples: list[Sample], dp_size: int, hf_config: Hf
) -> list[RankData]:
    """Converts, schedules and splits the samples of a rollout. Returns one RankData per data-parallel rank."""
    return scheduled(config, checked_data(config, hooks, samples, hf_config), dp_size, hf_config)


def checked_data(config: Config, hooks: Hooks, samples: list[Sample], hf_config: Hf) -> TrainData:
    """Returns the train data of a rollout before the split."""
    data = convert_samples_to_train_data(config, hooks, samples)
    data.setdefault("total_lengths", [len(tokens) for tokens in data["tokens"]])
    if config.off_policy.use_rollout_routing_replay:  # here, as a hook may have made the columns
        routed_experts.check_column(data, hf_config)
    return data


def scheduled(config: Config, data: TrainData, dp_size: int, hf_config: Hf) -> list[RankData]:
    """Splits the result of `checked_data` into micro-batches of `dp_size` data-parallel ranks. Returns one part per
    rank."""
    plan = plan_together if loss_for(config.algorithm).pairs else plan_steps
    schedule = plan(
        config.data,
        config.megatron,
        data["total_lengths"],
        data["rollout_ids"],
        dp_size,
        hf_config,
        data["response_lengths"],
    )
    return split_by_dp(data, schedule)


def held_out_data(config: Config, data: TrainData, dp_size: int, hf_config: Hf) -> list[RankData]:
    """Splits the `checked_data` of a held-out set into micro-batches of `dp_size` data-parallel ranks. Returns one part
    per rank. The denominators make means over the whole set, as for a single optimizer step."""
    schedule, counted = plan_held_out(
        *(config.data, config.megatron, data["total_lengths"], data["rollout_ids"], dp_size, hf_config),
        together=loss_for(config.algorithm).pairs,
    )
    ranks = split_by_dp(data, schedule)
    for part, count in zip(ranks, counted, strict=True):
        part["counted_micro_batches"] = count
    return ranks
