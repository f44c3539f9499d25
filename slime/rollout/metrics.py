"""This module computes metrics from samples, under slime's names. Its functions use no engine and no tracker.

Rewards, pass@k, zero_std and the truncated ratio count trajectories: siblings that a generate function fanned out count
as one trajectory with the mean of their rewards. Lengths, speeds and repetition count samples, which are the sequences
that are trained. `sample_metrics` returns names without a prefix. `rollout_metrics` and `eval_metrics` add the prefixes
rollout/, perf/ and eval/.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import fields
from typing import TypeVar

from slime.config.schema import Config
from slime.config.sections.logging import LoggingConfig
from slime.config.sections.reward import eval_reward_key
from slime.data import kept_tokens
from slime.data.agents import session_record
from slime.data.drawing.mixing import SOURCE, data_sets
from slime.data.trajectories import trajectories, trajectory_rewards, truncated_trajectories
from slime.environments import figures as environments
from slime.records.counts import SpeculationCounts
from slime.roles.served import by_name, teachers
from slime.rollout.base_types import EvalData
from slime.rollout.on_policy_distillation import find_source
from slime.rollout.rewards import finite, several
from slime.types import Sample, SampleGroup

T = TypeVar("T")
_REPEATED_CHARS, _REPEATED_TIMES, _LONGEST_UNIT = 100, 4, 200


def compute_statistics(values: Sequence[float]) -> dict[str, float]:
    """Returns mean, median, max and min. `values` has at least one entry."""
    return {
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "max": max(values),
        "min": min(values),
    }


def rollout_metrics(c: Config, groups: list[SampleGroup], rollout_time_s: float) -> dict[str, float]:
    """Returns the rollout/* and perf/* metrics of the groups to train on. `rollout_time_s` is wall time."""
    key = c.reward.reward_key
    samples = [sample for group in groups for sample in group]
    metrics = {f"rollout/{name}": value for name, value in sample_metrics(c.logging, key, groups).items()}
    metrics["rollout/raw_reward"] = statistics.fmean(trajectory_rewards(samples, key))
    metrics |= {f"rollout/{name}": value for name, value in teacher_metrics(c, samples).items()}
    if c.weight_update.flush_interval != 1:
        metrics |= {f"rollout/{name}": value for name, value in _cache_ages(samples).items()}
    if any(one.name for one in data_sets(c.data)):
        metrics |= {f"rollout/{name}": value for name, value in data_source_metrics(key, groups).items()}
    if c.logging.log_passrate:
        rewards = [trajectory_rewards(group, key) for group in groups]
        metrics |= {f"rollout/passrate/{name}": value for name, value in pass_rate(rewards).items()}
    metrics |= {
        f"perf/{name}": value
        for name, value in perf_metrics(c.cluster.rollout_num_gpus, samples, rollout_time_s).items()
    }
    return metrics


def data_source_metrics(reward_key: str | None, groups: list[SampleGroup]) -> dict[str, float]:
    """Returns raw_reward/{source}, the mean reward, and group_share/{source}, the share of the groups. The source is
    `data_source` in the samples' metadata."""
    each: dict[str, list[SampleGroup]] = {}
    for group in groups:
        each.setdefault(str(group[0].metadata.get(SOURCE)), []).append(group)
    metrics = {}
    for source, its in sorted(each.items()):
        rewards = [reward for group in its for reward in trajectory_rewards(group, reward_key)]
        metrics[f"raw_reward/{source}"] = statistics.fmean(rewards)
        metrics[f"group_share/{source}"] = len(its) / len(groups)
    return metrics


def teacher_metrics(c: Config, samples: list[Sample]) -> dict[str, float]:
    """Returns opd_reverse_kl/{source} and opd_samples/{source} for every served teacher.

    The first is the sampler's log-prob minus the teacher's, averaged over a sample's trained tokens, then over samples.
    The second is the number of samples. The trainer computes opd_reverse_kl over all teachers. Its log-probs may differ
    a little from the sampler's.
    """
    flags = c.distillation
    sources = list(teachers(c) or by_name("opd_teacher_url", flags.opd_teacher_url))
    each: dict[str, list[Sample]] = {}
    for sample in samples if sources else ():
        each.setdefault(find_source(flags, sample, sources), []).append(sample)
    metrics = {}
    for source, its in each.items():
        metrics[f"opd_samples/{source}"] = float(len(its))
        means = [statistics.fmean(differences) for sample in its if (differences := _reverse_kl(sample))]
        if means:
            metrics[f"opd_reverse_kl/{source}"] = statistics.fmean(means)
    return metrics


def _reverse_kl(sample: Sample) -> list[float]:
    """Returns the sampler's log-prob minus the teacher's for each trained token."""
    ours, theirs = sample.rollout_log_probs, sample.teacher_log_probs
    if sample.remove_sample or ours is None or theirs is None:
        return []
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
    return [a - b for a, b, trained in zip(ours, theirs, mask, strict=True) if trained]


def eval_metrics(c: Config, data: EvalData) -> dict[str, float]:
    """Returns eval/{name} (mean reward), eval/{name}/..., eval/{name}-truncated_ratio and, with --log-passrate,
    eval/{name}-pass@k.

    `data` is `RolloutFnEvalOutput.data`. Responses that passed their deadline have no reward, and the means
    exclude them. If there are such responses, eval/{name}-aborted_ratio is their share.
    """
    metrics: dict[str, float] = {}
    key = eval_reward_key(c.reward)
    for name, result in data.items():
        metrics[f"eval/{name}"] = statistics.fmean(result["rewards"])
        metrics[f"eval/{name}-truncated_ratio"] = statistics.fmean(map(float, result["truncated"]))
        samples: list[Sample] = result.get("samples") or []
        if not samples:
            continue
        scored = [sample for sample in samples if sample.status is not Sample.Status.ABORTED]
        if len(scored) < len(samples):
            metrics[f"eval/{name}-aborted_ratio"] = 1 - len(trajectories(scored)) / len(trajectories(samples))
        groups = group_samples(scored)
        for figure, value in sample_metrics(c.logging, key, groups).items():
            metrics[f"eval/{name}/{figure}"] = value
        if c.logging.log_passrate:
            rewards = [trajectory_rewards(group, key) for group in groups]
            metrics |= {f"eval/{name}-{rate}": value for rate, value in pass_rate(rewards).items()}
    return metrics


def sample_metrics(
    logging: LoggingConfig, reward_key: str | None, groups: list[SampleGroup]
) -> dict[str, float]:
    """Returns the metrics that training and evaluation share. `reward_key` selects the entry of a reward record.

    response_len/* counts trained tokens. zero_std/count_{r} is the number of groups whose rewards are all r (to
    one decimal). repetition_frac is the share of responses for which `ends_in_repetition` is true.
    """
    samples = [sample for group in groups for sample in group]
    count = len(samples)
    metrics: dict[str, float] = {
        f"response_len/{name}": value
        for name, value in compute_statistics(
            [sample.effective_response_length for sample in samples]
        ).items()
    }
    metrics["truncated_ratio"] = statistics.fmean(truncated_trajectories(samples))
    metrics["repetition_frac"] = sum(ends_in_repetition(s.response) for s in samples) / count
    for reward, groups_of_it in sorted(_constant_rewards(reward_key, groups).items()):
        metrics[f"zero_std/count_{reward}"] = groups_of_it
    metrics |= _cache_and_speculation(samples) | kept_tokens.figures(samples)
    metrics |= session_record.figures(samples) | finite.figures(samples) | several.figures(samples)
    metrics |= environments.figures(samples)
    if logging.log_reward_category:
        firsts = [parts[0].reward for parts in trajectories(samples)]
        categories = Counter(r[logging.log_reward_category] for r in firsts if isinstance(r, dict))
        metrics |= {f"error_cat/{category}": n / len(firsts) for category, n in categories.items()}
    if logging.log_multi_turn:
        metrics |= _multi_turn(samples)
    if logging.log_correct_samples:
        correct = [s.effective_response_length for s in samples if s.reward_value(reward_key) == 1]
        metrics |= {
            f"correct_response_len/{k}": v
            for k, v in (compute_statistics(correct) if correct else {}).items()
        }
    return metrics


def perf_metrics(gpus: int, samples: list[Sample], rollout_time_s: float) -> dict[str, float]:
    """Returns tokens per second, per GPU of the engines and for the longest sample. "effective" counts trained tokens.

    longest_sample_non_generation_time is the mean time in seconds that the longest samples spent outside the engine
    (in tools). ..._tokens_per_sec_without_non_generation is their speed in the rest of the rollout. Both are
    present only if a sample spent time outside the engine.
    """
    metrics = {"rollout_time": rollout_time_s}
    waits = [sample.non_generation_time for sample in samples]
    if max(waits) > 0:
        metrics |= {f"non_generation_time/{name}": value for name, value in compute_statistics(waits).items()}
    lengths = {
        "": [sample.response_length for sample in samples],
        "effective_": [sample.effective_response_length for sample in samples],
    }
    for kind, values in lengths.items():
        if gpus:
            metrics[f"{kind}tokens_per_gpu_per_sec"] = sum(values) / rollout_time_s / gpus
        longest = max(values)
        metrics[f"longest_{kind}sample_tokens_per_sec"] = longest / rollout_time_s
        if max(waits) > 0:
            wait = statistics.fmean(w for w, length in zip(waits, values, strict=True) if length == longest)
            metrics[f"longest_{kind}sample_non_generation_time"] = wait
            # A sample that started in an earlier rollout may have waited longer than this rollout took.
            if wait < rollout_time_s:
                speed = longest / (rollout_time_s - wait)
                metrics[f"longest_{kind}sample_tokens_per_sec_without_non_generation"] = speed
    return metrics


def pass_rate(rewards: Iterable[Sequence[float]]) -> dict[str, float]:
    """Returns pass@k for k = 1, 2, 4, ... up to the size of the smallest group: `1 - comb(n - c, k) / comb(n, k)`.

    A group has n rewards, and c rewards equal 1 (Chen et al., 2107.03374, equation 1).
    """
    counts = [(len(group), sum(reward == 1 for reward in group)) for group in rewards]
    rates, k = {}, 1
    while k <= min(n for n, _ in counts):
        rates[f"pass@{k}"] = statistics.fmean(1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts)
        k *= 2
    return rates


def ends_in_repetition(text: str) -> bool:
    """Returns True if the text ends in a loop: 1 to 200 characters, 4 or more times, over at least 100 characters."""
    last = at = len(text) - 1
    # A unit ends at an earlier occurrence of the last character. `rfind` steps back through these occurrences.
    while at >= 0 and (at := text.rfind(text[last], max(last - _LONGEST_UNIT, 0), at)) >= 0:
        unit = last - at
        length = max(_REPEATED_CHARS, _REPEATED_TIMES * unit)
        if length > len(text):
            return False  # longer units need longer texts
        if text[unit - length :] == text[-length:-unit]:
            return True
    return False


def group_by(iterable: Iterable[T], key: Callable[[T], Hashable] | None = None) -> dict[Hashable, list[T]]:
    """Maps `key(item)` (without a key, the item) to a list of its items, in order of first appearance."""
    groups: dict[Hashable, list[T]] = {}
    for item in iterable:
        groups.setdefault(item if key is None else key(item), []).append(item)
    return groups


def group_samples(samples: Iterable[Sample]) -> list[SampleGroup]:
    """Returns the samples grouped by `group_index`, in order of first appearance."""
    return list(group_by(samples, lambda sample: sample.group_index).values())


def _constant_rewards(reward_key: str | None, groups: list[SampleGroup]) -> Counter[float]:
    counts: Counter[float] = Counter()
    for group in groups:
        rewards = trajectory_rewards(group, reward_key)
        if len(rewards) > 1 and max(rewards) == min(rewards):
            counts[round(rewards[0], 1) + 0.0] += 1  # -0.0 + 0.0 is 0.0
    return counts


def _cache_ages(samples: list[Sample]) -> dict[str, float]:
    """Returns the mean and the largest age, in weight updates, of the prompt tokens that came from engines' caches."""
    infos = [sample.prefix_cache_info for sample in samples]
    if not (cached := sum(info.cached_tokens for info in infos)):
        return {}
    return {
        "prefix_cache_age/mean": sum(info.age_total for info in infos) / cached,
        "prefix_cache_age/max": max(info.age_largest for info in infos),
    }


def _cache_and_speculation(samples: list[Sample]) -> dict[str, float]:
    metrics = {}
    prompt_tokens = sum(s.prefix_cache_info.total_prompt_tokens for s in samples)
    if prompt_tokens:
        cached = sum(s.prefix_cache_info.cached_tokens for s in samples)
        metrics["prefix_cache_hit_rate"] = cached / prompt_tokens
        metrics["avg_cached_tokens_per_sample"] = cached / len(samples)
    total = SpeculationCounts()
    for name in (each.name for each in fields(total)):
        setattr(total, name, sum(getattr(sample.spec_info, name) for sample in samples))
    if total.spec_draft_token_num and total.spec_verify_ct:
        metrics["spec_accept_rate"] = total.spec_accept_rate
        metrics["spec_accept_length"] = total.spec_accept_length
    return metrics


def _multi_turn(samples: list[Sample]) -> dict[str, float]:
    """Returns lengths with and without tool tokens, and the number of turns that the model wrote."""
    masks = [s.loss_mask if s.loss_mask is not None else [1] * s.response_length for s in samples]
    values = {
        "raw_response_len": [sample.response_length for sample in samples],
        "wo_obs_response_len": [sum(mask) for mask in masks],
        "rounds": [sum(trained for trained, _ in itertools.groupby(mask)) for mask in masks],
    }
    return {
        f"multi_turn/{kind}/{name}": v
        for kind, x in values.items()
        for name, v in compute_statistics(x).items()
    }
