"""Import path of slime plug-ins: see slime.rollout.rewards.deepscaler."""

from slime.rollout.rewards.deepscaler import get_deepscaler_rule_based_reward

__all__ = ["get_deepscaler_rule_based_reward"]
