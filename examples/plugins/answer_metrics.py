"""Logs each rollout and each evaluation in place of vime: the metrics that vime logs, and metrics of right answers.

    --custom-rollout-log-function-path answer_metrics.log_rollout
    --custom-eval-rollout-log-function-path answer_metrics.log_evaluation

A right answer has a reward above 0.
"""

import logging

from slime.ray.rollout import compute_metrics_from_samples, compute_perf_metrics_from_samples
from slime.utils import logging_utils
from slime.utils.metric_utils import (
    compute_pass_rate,
    compute_rollout_step,
    compute_statistics,
    dict_add_prefix,
)
from slime.utils.misc import group_by
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


def answers(args, samples: list[Sample]) -> dict[str, float]:
    """Returns the share of prompts with a right answer, and statistics of the right answers' lengths."""
    prompts = group_by(samples, lambda sample: sample.group_index)
    right = [sample for sample in samples if sample.get_reward_value(args) > 0]
    solved = {sample.group_index for sample in right}
    metrics = {"solved_prompts": len(solved) / len(prompts), "right": len(right)}
    if right:
        lengths = compute_statistics([sample.response_length for sample in right])
        metrics |= dict_add_prefix(lengths, "right_response_len/")
    return metrics


def log_rollout(rollout_id, args, samples, rollout_extra_metrics, rollout_time) -> bool:
    """Logs a rollout. Returns True, so that vime does not log the rollout again."""
    metrics = {**(rollout_extra_metrics or {})}
    metrics |= dict_add_prefix(compute_metrics_from_samples(args, samples), "rollout/")
    metrics |= dict_add_prefix(compute_perf_metrics_from_samples(args, samples, rollout_time), "perf/")
    metrics |= dict_add_prefix(answers(args, samples), "answers/")
    metrics["rollout/step"] = compute_rollout_step(args, rollout_id)
    logger.info("rollout %d: %s", rollout_id, metrics)
    logging_utils.log(args, metrics, step_key="rollout/step")
    return True


def log_evaluation(rollout_id, args, data, extra_metrics) -> bool:
    """Logs an evaluation. Returns True, so that vime does not log the evaluation again."""
    metrics = {**(extra_metrics or {})}
    for name, result in data.items():
        rewards, samples = result["rewards"], result["samples"]
        metrics[f"eval/{name}"] = sum(rewards) / len(rewards)
        metrics |= dict_add_prefix(compute_metrics_from_samples(args, samples), f"eval/{name}/")
        metrics |= dict_add_prefix(answers(args, samples), f"answers/{name}/")
        size = len(samples) // len(group_by(samples, lambda sample: sample.group_index))
        metrics |= dict_add_prefix(compute_pass_rate(rewards, size), f"eval/{name}-")
    metrics["eval/step"] = compute_rollout_step(args, rollout_id)
    logging_utils.log(args, metrics, step_key="eval/step")
    return True
