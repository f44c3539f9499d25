"""Import path of slime plug-ins: see slime.rollout.rewards.gpqa."""

from slime.rollout.rewards.gpqa import DEFAULT_VALID_LETTERS, compute_gpqa_reward
from slime.rollout.rewards.gpqa import chosen_letter as _extract_letter_from_response

__all__ = ["DEFAULT_VALID_LETTERS", "_extract_letter_from_response", "compute_gpqa_reward"]
