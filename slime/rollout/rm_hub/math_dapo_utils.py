"""Import path of slime plug-ins: see slime.rollout.rewards.dapo and .text."""

from slime.rollout.rewards.dapo import compute_score, normalize_final_answer
from slime.rollout.rewards.text import last_boxed_only_string, remove_boxed

__all__ = ["compute_score", "last_boxed_only_string", "normalize_final_answer", "remove_boxed"]
