"""Import path of slime plug-ins: see slime.rollout.rewards.gpqa."""

from slime.rollout.rewards.gpqa import compute_gpqa_reward

__all__ = ["compute_gpqa_reward"]
