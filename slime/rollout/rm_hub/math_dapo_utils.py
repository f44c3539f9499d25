"""Import path of slime plug-ins: see slime.rollout.rewards.dapo."""

from slime.rollout.rewards.dapo import compute_score, normalize_final_answer

__all__ = ["compute_score", "normalize_final_answer"]
