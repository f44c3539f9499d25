"""Import path of slime plug-ins: see slime.rollout.rewards.ifbench."""

from slime.rollout.rewards.ifbench import ifbench_reward as compute_ifbench_reward

__all__ = ["compute_ifbench_reward"]
