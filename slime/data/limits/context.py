"""The room that a prompt leaves for the response: the largest number of tokens in a sequence, and the setting for
it."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from slime.checkpoints.hf_config import read_hf_config
from slime.config.schema import Config
from slime.records.errors import FlagError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

MODEL_SETTING = "max_position_embeddings"
"""Setting of config.json with the longest sequence of a model."""
_TEMPLATE_BYTES = 4096
"""Upper bound in bytes for the text that a chat template adds to a prompt."""
_MOST_COUNTED = 20_000
"""Largest number of prompts, the longest ones, that are tokenised only to warn about short responses."""


@dataclass(frozen=True)
class ContextLimits:
    """The longest sequence, and a function that loads the model's tokenizer, which few files need. `tokens` is None
    without a limit."""

    tokens: int | None
    tokenizer: Callable[[], PreTrainedTokenizerBase]
    setting: str = MODEL_SETTING
    """The flag or the setting of config.json that sets `tokens`."""
    response: int | None = None
    """Largest number of tokens in a response, or None for any number."""
    response_flag: str = "--rollout-max-response-len"

    @classmethod
    def of(cls, c: Config, tokenizer: Callable[[], PreTrainedTokenizerBase]) -> ContextLimits:
        """Returns the context of the policy's engines."""
        tokens, setting = longest_sequence(c)
        return cls(tokens, tokenizer, setting, c.rollout.rollout_max_response_len)

    def for_responses(self, tokens: int | None, flag: str) -> ContextLimits:
        """Returns the same context for responses of another length."""
        return dataclasses.replace(self, response=tokens, response_flag=flag)


@dataclass(frozen=True)
class PromptRows:
    """The prompts of a file in the form that `check_prompt_lengths` reads."""

    sizes: np.ndarray
    """Number of characters and of tokens of images per prompt."""
    lists: np.ndarray
    """True for each prompt that is a list of messages."""
    lengths: Callable[[np.ndarray, PreTrainedTokenizerBase], np.ndarray]
    """Returns the number of tokens for the prompts at the given indices."""
    locate: Callable[[int], str]
    """Returns file and line of the prompt at an index."""


def longest_sequence(c: Config) -> tuple[int | None, str]:
    """Returns the largest number of tokens that prompt and response may have together in the policy's engines, and the
    setting for it: a flag of the engine, or the model's config.json. The number is None if neither has a limit."""
    facts, checkpoint = c.engine.engine_facts, c.rollout.hf_checkpoint
    of_model = read_hf_config(checkpoint).get(MODEL_SETTING) if checkpoint else None
    if facts.context is not None:
        return facts.context, facts.flag("context")
    return of_model, MODEL_SETTING


def prompt_limit(max_prompt_len: int | None, max_context_len: int | None) -> int | None:
    """Returns the longest prompt that both limits allow. The context must have room for one response token."""
    return find_lowest(max_prompt_len, None if max_context_len is None else max_context_len - 1)


def find_lowest(*limits: int | None) -> int | None:
    """Returns the lowest limit, or None without a limit."""
    return min((limit for limit in limits if limit is not None), default=None)


def check_prompt_lengths(rows: PromptRows, context: ContextLimits, limit_flag: str) -> None:
    """Raises ValueError if a prompt has `context.tokens` tokens or more. Logs a warning if a prompt leaves less room
    than a response may need, because generation cuts such a response.

    Renders all message lists, and tokenises only the texts that may reach the limit.
    """
    if context.tokens is None:
        _measured(rows, np.flatnonzero(rows.lists > 0), math.inf, context)
        return
    longest = context.tokens
    limit = max(longest - (context.response or 0), 0)
    looked_at = _doubtful(rows, longest)
    if (more := np.setdiff1d(_doubtful(rows, limit), looked_at)).size > _MOST_COUNTED:
        more = more[np.argsort(rows.sizes[more], kind="stable")[-_MOST_COUNTED:]]
    looked_at = np.union1d(looked_at, more)
    lengths = _measured(rows, looked_at, longest, context)
    too_long = [i for i in looked_at.tolist() if lengths.get(i, longest) >= longest]
    if too_long:
        worst = max(too_long, key=lambda i: int(rows.sizes[i]))
        size = f"{lengths[worst]} tokens" if worst in lengths else f"{rows.sizes[worst]} characters"
        raise FlagError(
            "prompts",
            f"be shorter than the model's context of {longest} tokens ({context.setting})",
            f"{len(too_long)} of {len(rows.sizes)} that are not",
            f"the longest has {size} at {rows.locate(worst)}; shorten them, or leave them out with "
            f"{limit_flag}",
        )
    if tight := [i for i, length in lengths.items() if length > limit]:
        worst = max(tight, key=lambda i: lengths[i])
        logger.warning(
            "%d of %d prompts leave less room than %s %d in the context of %d tokens (%s): their responses are cut; "
            "the longest prompt has %d tokens and leaves %d, at %s",
            *(len(tight), len(rows.sizes), context.response_flag, context.response, longest, context.setting),
            *(lengths[worst], longest - lengths[worst], rows.locate(worst)),
        )


def _doubtful(rows: PromptRows, tokens: int) -> np.ndarray:
    """Returns the indices of the prompts that may have `tokens` tokens. A token has at least one byte and a character
    has at most four bytes, so a text with fewer characters than `tokens` / 4 has fewer tokens."""
    return np.flatnonzero((rows.sizes >= max(0, tokens - _TEMPLATE_BYTES + 3) // 4) | (rows.lists > 0))


def _measured(
    rows: PromptRows, indices: np.ndarray, longest: float, context: ContextLimits
) -> dict[int, int]:
    """Returns the number of tokens for the prompts at `indices`. A prompt that must be longer than `longest` is left
    out, because its tokenisation may take minutes."""
    if not len(indices):
        return {}
    tokenizer = context.tokenizer()
    # A text with more characters than this is too long for any choice of tokens.
    certain = longest * max(map(len, tokenizer.get_vocab()))
    unclear = indices[rows.sizes[indices] <= certain]
    return dict(zip(unclear.tolist(), rows.lengths(unclear, tokenizer).tolist(), strict=True))
