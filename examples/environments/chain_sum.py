"""Sums of `reasoning-gym` as an environment of `verifiers`, for a published model. Needs `verifiers[rg]`."""

from __future__ import annotations

import verifiers as vf


def load_environment(tasks: int = 2000, seed: int = 0) -> vf.Environment:
    """Returns the environment. The answer is in the tag <answer>, and the reward is that of reasoning-gym."""
    return vf.ReasoningGymEnv(gym="chain_sum", num_train_examples=tasks, num_eval_examples=100, seed=seed)
