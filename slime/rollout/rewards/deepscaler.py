"""The `deepscaler` reward: a boxed answer, counted only after the model has ended its thinking.

Follows DeepScaleR (Luo et al., 2025), as slime scripts use it for reasoning models.
"""

from __future__ import annotations

from typing import Any

from slime.rollout.rewards.math_boxed import grade_answer_verl


def get_deepscaler_rule_based_reward(response: str, label: Any) -> float:
    """1.0 when the final part of `response` boxes the answer of `label`, else 0.0.

    The final part is what follows the last `</think>`, else what follows the last `###Response`. A response
    with neither has not finished thinking and earns 0.0 (a model that does not think: `--rm-type math`).
    """
    _, marker, final = response.rpartition("</think>")
    if not marker:
        _, marker, final = response.rpartition("###Response")
    return float(grade_answer_verl(final if marker else "", label))


def deepscaler_reward(response: str, label: Any, metadata: dict[str, Any]) -> float:
    """1.0 or 0.0."""
    return get_deepscaler_rule_based_reward(response, label)
