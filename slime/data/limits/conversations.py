"""Checks of the conversations that SFT and preference pairs train on: each conversation must have a loss mask and fit
the model's context."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from slime.checkpoints.hf_config import read_hf_config
from slime.config.schema import Config
from slime.data.files import RowLocation
from slime.data.limits.context import MODEL_SETTING
from slime.data.media.row import without_media
from slime.data.rows import RowColumns
from slime.data.tokenizer import tokenizer_identity
from slime.loss_mask import MultiTurnLossMaskGenerator
from slime.records.errors import FlagError
from slime.types import Message, Prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Masks:
    """Measures the conversations of a row in the form that the trainer gets."""

    tokenizer: PreTrainedTokenizerBase
    kind: str
    """Value of --loss-mask-type."""
    template_kwargs: dict[str, object] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    """Keys of a row's metadata that hold conversations. Without names, the prompt is the conversation."""
    longest: int | None = None
    """Largest number of tokens that the model's config.json allows, or None."""
    flag: str = "--rollout-max-context-len"
    """Flag that leaves out longer conversations."""

    @classmethod
    def of(
        cls,
        c: Config,
        tokenizer: PreTrainedTokenizerBase,
        columns: RowColumns,
        flag: str = "--rollout-max-context-len",
    ) -> Masks:
        """Returns the measure for the rows of a file with these columns."""
        names = () if columns.chosen_key is None else ("chosen", "rejected")
        kwargs = columns.apply_chat_template_kwargs
        longest = read_hf_config(c.rollout.hf_checkpoint).get(MODEL_SETTING)
        return cls(tokenizer, c.data.loss_mask_type, kwargs, names, longest, flag)

    @property
    def identity(self) -> str:
        """Returns a text with all inputs of `measure` other than the row and the columns."""
        return f"{self.kind} {self.names} {tokenizer_identity(self.tokenizer)}"

    def measure(self, prompt: Prompt, where: RowLocation) -> int:
        """Returns the number of tokens in the longest conversation of a row. An image counts as its marker. Raises
        ValueError with file and line for a conversation without a loss mask."""
        every = [prompt.metadata[name] for name in self.names] or [prompt.text]
        return max(self._tokens(messages, prompt, where) for messages in every)

    def _tokens(self, messages: list[Message], prompt: Prompt, where: RowLocation) -> int:
        generator = MultiTurnLossMaskGenerator(self.tokenizer, self.kind)
        try:
            tokens, mask = generator.get_loss_mask(
                without_media(messages), prompt.metadata.get("tools"), self.template_kwargs
            )
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        except Exception as error:  # border: a chat template is a program of the model's author
            raise FlagError(
                f"{where}: the chat template",
                "be able to render the conversation",
                f"{type(error).__name__}: {error}",
                "fix the line, or check the tokenizer's chat template and --apply-chat-template-kwargs",
            ) from error
        if not any(mask):
            raise ValueError(
                f"{where}: a conversation must have tokens to train on, got none in {len(tokens)}; fix the line"
            )
        return len(tokens)

    def require_fit(self, lengths: np.ndarray, locate: Callable[[int], str]) -> None:
        """Raises ValueError if a conversation is longer than the model's context. `locate` returns a row's file and
        line."""
        too_long = np.flatnonzero(lengths > self.longest) if self.longest is not None else ()
        if len(too_long):
            worst = int(lengths.argmax())
            raise FlagError(
                "conversations",
                f"fit the model's context of {self.longest} tokens ({MODEL_SETTING})",
                f"{len(too_long)} of {len(lengths)} that do not",
                f"the longest has {lengths[worst]} tokens at {locate(worst)}; shorten them, or leave "
                f"them out with {self.flag} {self.longest}",
            )
