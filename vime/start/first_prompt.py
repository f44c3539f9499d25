"""Shows the first prompt in `vime plan`: its text as the model reads it, its label, and the reward from the check of
the reward."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from slime.config import Config
from slime.types import Prompt
from vime.start.dry_reward import check_reward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN = 100
"""Number of characters shown from the beginning and from the end of a text."""
_KINDS = ((bool, "true or false"), (str, "text"), (int | float, "number"), (list, "list"), (dict, "object"))
"""Types of a label, with JSON's names."""


class FirstPrompt:
    """Calls the reward for each data set, and stores the first prompt of the training data."""

    def __init__(self) -> None:
        self._prompt: Prompt | None = None
        self._reward: list[str] = []

    def score(
        self,
        config: Config,
        prompt: Prompt,
        tokenizer: Callable[[], PreTrainedTokenizerBase],
        *,
        custom_rm_path: str | None = None,
        rm_type: str | list[str] | None = None,
        where: str = "",
    ) -> str | None:
        """Calls `check_reward` with the same arguments."""
        if not where and self._prompt is None:
            self._prompt = prompt
        return check_reward(
            config,
            prompt,
            tokenizer,
            custom_rm_path=custom_rm_path,
            rm_type=rm_type,
            where=where,
            on_reward=None if where else self._reward.append,
        )

    def lines(self) -> Iterator[str]:
        """Yields the lines, or nothing if no prompt was read."""
        if self._prompt is None:
            return
        text, label = self._prompt.text, self._prompt.label
        read = "as the model reads it" if isinstance(text, str) else "messages, without --apply-chat-template"
        yield f"first prompt, {read}: {shortened(text)}"
        if label is None:
            yield "its label: none (--label-key names the column)"
        else:
            kind = next(
                (name for kind_type, name in _KINDS if isinstance(label, kind_type)), type(label).__name__
            )
            yield f"its label: {shortened(label)} ({kind})"
        for reward in self._reward[:1]:
            yield f"its reward, with its own text as the response: {reward}"


def shortened(value: object) -> str:
    """Formats a value as JSON on one line, without the middle of a long text."""
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return shown if len(shown) <= 2 * _SHOWN + 5 else f"{shown[:_SHOWN]} ... {shown[-_SHOWN:]}"
