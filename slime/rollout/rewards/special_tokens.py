"""This module removes the tokenizer's special tokens, whatever their spelling, from a response for rewards."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slime.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_READ_BY_REWARDS = ("<think>", "</think>")
"""Special tokens that stay in the text, because rewards read them."""


def answer_text(
    sample: Sample, tokenizer: PreTrainedTokenizerBase | None, stop_token_ids: Sequence[int] | None = None
) -> str:
    """Returns the response without special tokens. A line break replaces each inner special token. Does not change
    `sample`.

    The token ids identify special tokens, so a text that only looks like a special token stays. If a hook has written
    `sample.response`, so that it is not the text of the ids, the tokens are removed by their texts. A final token of
    `stop_token_ids` is also removed.
    """
    if tokenizer is None or not sample.response:
        return sample.response
    special = _special_tokens(tokenizer)
    ids = sample.tokens[-sample.response_length :] if sample.response_length else []
    if ids and sample.response.strip() == _decoded(tokenizer, ids).strip():
        ended = ids[-1] in (stop_token_ids or ())
        return _without(tokenizer, ids[:-1] if ended else ids, special)
    kept = [token for token in ids if token not in special]
    if kept and sample.response.strip() == _decoded(tokenizer, kept).strip():
        return sample.response  # --rollout-skip-special-tokens
    return _without_texts(sample.response, frozenset(special.values()))


def plain_text(sample: Sample, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Returns the response as other trainers decode it: without every special token. A text that a hook has written
    stays."""
    ids = sample.tokens[-sample.response_length :] if sample.response_length else []
    if tokenizer is None or not ids:
        return sample.response
    plain = str(tokenizer.decode(ids, skip_special_tokens=True))
    same = (_without_end(text) for text in (plain, _decoded(tokenizer, ids)))
    return plain if _without_end(sample.response) in same else sample.response


def _without_end(text: str) -> str:
    """Returns the text without spaces around it, and without the marks of a character that ends incomplete, which an
    engine leaves out."""
    return text.strip().rstrip("\ufffd")


def _without(tokenizer: PreTrainedTokenizerBase, ids: list[int], special: dict[int, str]) -> str:
    runs: list[list[int]] = [[]]
    for token in ids:
        if token not in special:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return "\n".join(_decoded(tokenizer, run) for run in runs if run)


def _without_texts(text: str, special: frozenset[str]) -> str:
    pattern = _pattern(special)
    return text if pattern is None else pattern.sub("\n", text).strip("\n")


@functools.lru_cache(maxsize=8)
def _pattern(special: frozenset[str]) -> re.Pattern[str] | None:
    longest_first = sorted(filter(None, special), key=len, reverse=True)
    return re.compile("(?:" + "|".join(map(re.escape, longest_first)) + ")+") if longest_first else None


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(
        tokenizer.decode(
            ids,
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
    )


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Maps the ids of the special tokens to their texts. The result is cached per tokenizer."""
    found = getattr(tokenizer, "_slime_special_tokens", None)
    if found is None:
        added = tokenizer.added_tokens_decoder
        found = {number: str(token) for number, token in added.items() if token.special}
        found |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        found = {number: text for number, text in found.items() if text not in _READ_BY_REWARDS}
        tokenizer._slime_special_tokens = found
    remembered: dict[int, str] = found
    return remembered
