"""The `dapo` reward: compares the last "Answer: ..." line with the label, as in DAPO (Yu et al., 2025).

The reward is a dict, so use `--reward-key score`. The score of a wrong answer is negative.
"""

from __future__ import annotations

import re
from typing import Any

from slime.rollout.rewards.math_equal import same_answer
from slime.rollout.rewards.numeric import canonical_number
from slime.rollout.rewards.text import expected_answer, extract_answer

NO_ANSWER = "[INVALID]"
_TAIL_CHARS = 300  # the answer must be at the end of the response
_ANSWER_LINE = re.compile(r"answer\s*:[\s*]*([^\n]+)", re.IGNORECASE)
_SPECIAL_TOKEN = re.compile(r"<\|[^|<>]*\|>")
_MATH_MODE = re.compile(r"\$([^$]+)\$")
_TEXT_COMMAND = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_LAYOUT = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[,!;: ]|\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\"")
_ARTICLE = re.compile(r"^(?:an?|the)\s+(?=[a-z]{2}|[0-9])", re.IGNORECASE)
_WITH_UNIT = re.compile(r"(\S*[0-9]\S*)(?:\s+[A-Za-z]{2,}\.?){1,3}")


def normalize_final_answer(text: str) -> str:
    """The answer without math mode, boxes, text commands, units, separators, "x =" and the final full stop.

    Numbers are in canonical form ("$1{,}000.0$ dollars" -> "1000"). Other answers have no white space.
    """
    text = _SPECIAL_TOKEN.sub("", str(text)).replace("\\$", "")
    text = extract_answer(text) or text
    if math_mode := _MATH_MODE.search(text):
        text = math_mode[1]
    text = _TEXT_COMMAND.sub(r" \1 ", text.rpartition("=")[2])
    text = _ARTICLE.sub("", _LAYOUT.sub("", text).strip("* \t")).rstrip(". ")
    if number_and_unit := _WITH_UNIT.fullmatch(text):
        text = number_and_unit[1]
    return canonical_number(text) or "".join(text.split())


def compute_score(solution_str: str, ground_truth: Any, strict_box_verify: bool = False) -> dict[str, Any]:
    """{"score": 1.0 or -1.0, "acc": whether it is right, "pred": the normalised answer or "[INVALID]"}.

    Only the last 300 characters of `solution_str` count. `strict_box_verify` reads the last box there instead
    of the last "Answer:" line. If the label is a number, the answer must be the same number in digits. Any other
    label is compared as mathematics (`same_answer`).
    """
    gold = normalize_final_answer(expected_answer(ground_truth))
    if not gold:
        raise ValueError(f"label must hold an answer, got {ground_truth!r}; check --label-key")
    tail = solution_str[-_TAIL_CHARS:]
    if strict_box_verify:
        found = extract_answer(tail)
    else:
        lines = _ANSWER_LINE.findall(tail)
        found = lines[-1] if lines else None
    pred = NO_ANSWER if found is None else normalize_final_answer(found)
    right = pred == gold
    if not right and found is not None and canonical_number(gold) is None:
        right = same_answer(pred, gold)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


def dapo_reward(response: str, label: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    """The dict of `compute_score`."""
    return compute_score(response, label)
