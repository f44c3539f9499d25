"""The `math` reward compares the last boxed answer of the response with the label."""

from __future__ import annotations

from slime.rollout.rewards.math_equal import same_answer
from slime.rollout.rewards.text import expected_answer, extract_answer, without_special_text
from slime.types import Metadata


def grade_answer_verl(solution_str: str, ground_truth: object) -> bool:
    """Returns True if the last `\\boxed{}` of `solution_str` equals the label's answer. Returns False without a box.

    `ground_truth` is the answer itself, a solution that boxes the answer, or a GSM8K solution that ends in "#### 18".
    Raises ValueError if the label has no answer. The call blocks, see `same_answer`.
    """
    gold = expected_answer(ground_truth)
    answer = extract_answer(without_special_text(solution_str))
    return answer is not None and same_answer(answer, gold)


def math_reward(response: str, label: object, metadata: Metadata) -> float:
    """Returns 1.0 or 0.0."""
    return float(grade_answer_verl(response, label))
