"""The `gsm8k` reward: compares the final number of the response with the label (Cobbe et al., 2021)."""

from __future__ import annotations

import re
from typing import Any

from slime.rollout.rewards.numeric import NUMBER, canonical_number, last_number
from slime.rollout.rewards.text import expected_answer, extract_answer

# The number must follow the marker directly: "#### Step 2" is a Markdown heading, not an answer.
_MARKED = re.compile(rf"####[ \t*]*({NUMBER.pattern})")


def final_number(response: str) -> str | None:
    """The final number of `response` in canonical form, or None.

    It is the number after the last "####". Without such a number, it is the last number in the last box; without a
    box, the last number in the text. Thousands separators, `$` and `%` are dropped.
    """
    text = response.replace("\\$", "$").replace("{,}", ",")
    marked = _MARKED.findall(text)
    if marked:
        return canonical_number(marked[-1])
    boxed = extract_answer(text)
    return last_number(boxed if boxed is not None else text)


def gsm8k_reward(response: str, label: Any, metadata: dict[str, Any]) -> float:
    """1.0 if response and label have the same final number, else 0.0.

    `label` is a number or a solution that ends in "#### 18". ValueError if the label has no number.
    """
    gold = last_number(expected_answer(label))
    if gold is None:
        raise ValueError(f"label must hold a number for --rm-type gsm8k, got {label!r}; check --label-key")
    return float(final_number(response) == gold)
