"""The `dapo` reward: compares the last "Answer: ..." line with the label, as in DAPO (Yu et al., 2025).

The reward is a dict, so use `--reward-key score`. The score of a wrong answer is negative.
"""

from __future__ import annotations

import re

from slime.rollout.rewards.math_equal import same_answer
from slime.rollout.rewards.notation import tidy
from slime.rollout.rewards.quantity import decimal_text, quantity
from slime.rollout.rewards.text import expected_answer, extract_answer, without_special_text
from slime.types import Metadata

NO_ANSWER = "[INVALID]"
_TAIL_CHARS = 300  # the answer must be at the end of the response
_ANSWER_LINE = re.compile(r"answer\s*:[\s*]*([^\n]+)", re.IGNORECASE)
_ARTICLE = re.compile(r"^(?:an?|the)\s+(?=[a-z]{2}|[0-9])", re.IGNORECASE)
_TEXT_COMMAND = re.compile(r"\\text\{([^{}]*)\}")


def _bare(text: str) -> str:
    """Returns the answer in a line or a label: the content of its box, without emphasis, quotes and an article."""
    text = without_special_text(str(text))
    text = (extract_answer(text) or text).strip("* \t`\"'")
    return _ARTICLE.sub("", text).strip()


def normalize_final_answer(text: str) -> str:
    """Returns the answer without math mode, boxes, text commands, units, separators, "x =" and the final full stop.

    Numbers are in canonical form ("$1{,}000.0$ dollars" -> "1000"). Other answers have no white space.
    """
    plain = tidy(_bare(text)).rpartition("=")[2].strip()
    found = quantity(plain)
    if found is not None and found.form in ("whole", "decimal") and found.base == 10:
        return decimal_text(found.value) or "".join(plain.split())
    return "".join(_TEXT_COMMAND.sub(r"\1", plain).replace("\\cdot ", "*").split())


def compute_score(
    solution_str: str, ground_truth: object, strict_box_verify: bool = False
) -> dict[str, object]:
    """Returns {"score": 1.0 or -1.0, "acc": True if correct, "pred": the normalised answer or "[INVALID]"}.

    Only the last 300 characters of `solution_str` count. `strict_box_verify` reads the last box there instead
    of the last "Answer:" line. The answer is compared as mathematics (`same_answer`).
    """
    gold = _bare(expected_answer(ground_truth))
    if not gold:
        raise ValueError(f"label must hold an answer, got {ground_truth!r:.80}; check --label-key")
    tail = without_special_text(solution_str)[-_TAIL_CHARS:]
    if strict_box_verify:
        found = extract_answer(tail)
    else:
        lines = _ANSWER_LINE.findall(tail)
        found = lines[-1] if lines else None
    right = found is not None and same_answer(_bare(found), gold)
    pred = NO_ANSWER if found is None else normalize_final_answer(found)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


def dapo_reward(response: str, label: object, metadata: Metadata) -> dict[str, object]:
    """Returns the dict of `compute_score`."""
    return compute_score(response, label)
