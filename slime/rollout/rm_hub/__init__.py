"""Import path of slime plug-ins: see slime.rollout.rewards."""

from slime.rollout.rewards import async_rm, batched_async_rm
from slime.rollout.rewards.dapo import compute_score as compute_score_dapo
from slime.rollout.rewards.deepscaler import get_deepscaler_rule_based_reward
from slime.rollout.rewards.f1 import f1_score
from slime.rollout.rewards.gpqa import compute_gpqa_reward
from slime.rollout.rewards.math_boxed import grade_answer_verl
from slime.rollout.rewards.text import extract_answer as extract_boxed_answer

__all__ = [
    "async_rm",
    "batched_async_rm",
    "compute_gpqa_reward",
    "compute_score_dapo",
    "extract_boxed_answer",
    "f1_score",
    "get_deepscaler_rule_based_reward",
    "grade_answer_verl",
]
