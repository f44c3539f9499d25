"""Import path of slime plug-ins: see slime.rollout.rewards.math_boxed, .math_equal and .text."""

from slime.rollout.rewards.math_boxed import grade_answer_verl
from slime.rollout.rewards.math_equal import same_answer as grade_answer_mathd
from slime.rollout.rewards.math_equal import same_answer as grade_answer_sympy
from slime.rollout.rewards.text import extract_answer, last_boxed_only_string, remove_boxed
from slime.rollout.rewards.text import extract_answer as extract_boxed_answer

__all__ = [
    "extract_answer",
    "extract_boxed_answer",
    "grade_answer_mathd",
    "grade_answer_sympy",
    "grade_answer_verl",
    "last_boxed_only_string",
    "remove_boxed",
]
