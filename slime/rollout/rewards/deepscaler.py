"""The `deepscaler` reward for reasoning models: the boxed answer after the end of the thinking.

Follows DeepScaleR (Luo et al., 2025), as slime scripts use it.
"""

from __future__ import annotations

from slime.rollout.rewards.math_boxed import grade_answer_verl
from slime.rollout.rewards.text import expected_answer
from slime.types import Metadata


def get_deepscaler_rule_based_reward(response: str, label: object) -> float:
    """Returns 1.0 if the final part of `response` boxes the answer of `label`, else 0.0.

    The final part follows the last `</think>`, or else the last `###Response`. A response with neither has not
    finished thinking, and its reward is 0.0. For a model that does not think, use `--rm-type math`. An empty label has
    reward 0.0, as in slime; `--rm-type deepscaler` raises an error for an empty label.
    """
    if label == "":
        return 0.0
    _, marker, final = response.rpartition("</think>")
    if not marker:
        _, marker, final = response.rpartition("###Response")
    return float(grade_answer_verl(final if marker else "", label))


def deepscaler_reward(response: str, label: object, metadata: Metadata) -> float:
    """Returns 1.0 or 0.0. Raises ValueError if the label has no answer."""
    expected_answer(label)
    return get_deepscaler_rule_based_reward(response, label)
