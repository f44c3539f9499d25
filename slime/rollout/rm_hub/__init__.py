"""Import path of slime plug-ins: see slime.rollout.rewards."""

from slime.rollout.rewards import async_rm, batched_async_rm
from slime.rollout.rewards.math_boxed import grade_answer_verl

__all__ = ["async_rm", "batched_async_rm", "grade_answer_verl"]
