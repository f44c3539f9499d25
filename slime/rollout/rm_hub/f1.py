"""Import path of slime plug-ins: see slime.rollout.rewards.f1."""

from slime.rollout.rewards.f1 import f1_score, normalize_answer

__all__ = ["f1_score", "normalize_answer"]
