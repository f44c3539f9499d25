"""The `f1` reward measures the overlap of words with the label, as SQuAD scores spans (Rajpurkar et al., 2016)."""

from __future__ import annotations

import re
import string
from collections import Counter

from slime.rollout.rewards.text import without_special_text
from slime.types import Metadata

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_ALL_OR_NOTHING = {"yes", "no", "noanswer"}


def normalize_answer(text: str) -> str:
    """Returns the text in lower case, without punctuation and English articles, with single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1_score(prediction: str | None, ground_truth: object) -> tuple[float, float, float]:
    """Returns (F1, precision, recall) over both texts' words. A repeated word counts once per occurrence.

    All three are zero without a common word, without a prediction, or if either text is exactly yes, no or noanswer
    and the other text differs.
    """
    if prediction is None:
        return 0.0, 0.0, 0.0
    answer, gold = normalize_answer(prediction), normalize_answer(str(ground_truth))
    if answer != gold and _ALL_OR_NOTHING & {answer, gold}:
        return 0.0, 0.0, 0.0
    answer_words, gold_words = answer.split(), gold.split()
    common = sum((Counter(answer_words) & Counter(gold_words)).values())
    if common == 0:
        return 0.0, 0.0, 0.0
    precision, recall = common / len(answer_words), common / len(gold_words)
    return 2 * common / (len(answer_words) + len(gold_words)), precision, recall


def check_label(label: object, metadata: Metadata) -> None:
    """Raises ValueError if the label has no word."""
    usable = isinstance(label, str | int | float) and not isinstance(label, bool) and label == label
    if not usable or not normalize_answer(str(label)):
        raise ValueError(f"label must hold a word for --rm-type f1, got {label!r:.80}; check --label-key")


def f1_reward(response: str, label: object, metadata: Metadata) -> float:
    """Returns the F1 in [0, 1]. Raises ValueError if the label has no word."""
    check_label(label, metadata)
    return f1_score(without_special_text(response), label)[0]
