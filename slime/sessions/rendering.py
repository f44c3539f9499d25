"""Renders new chat messages as the tokens that follow a session's tokens, and finds the end of the model's turn.

A session keeps the tokens as the model sampled them. A second rendering of the whole conversation would change these
tokens: templates leave out earlier reasoning and write tool calls in their own format, and the tokenizer may split a
text differently. So this module renders the conversation with a mark at the end of the model's last turn, and tokenises
only the text after the mark. The text between the mark and the next message closes the turn. A second rendering without
the new messages shows the length of the closing text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from slime.data.rows import render_chat
from slime.sessions.images import list_images
from slime.sessions.messages import RequestRejected
from slime.types import Message, Tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slime.vision.inputs import ImageInputs
    from slime.vision.processor import MediaProcessor

_PIECE = 1 << 15
"""Size of a piece in characters. Cutting a text into such pieces does not double its number of tokens."""


class Rendered(NamedTuple):
    """Rendered messages: the input for an engine."""

    token_ids: list[int]
    images: ImageInputs | None
    """The processed images of the messages."""


class BoundaryError(Exception):
    """The template does not show where the last turn of the model ends."""


class ChatRenderer:
    """Renders with a tokenizer's chat template. `options` are --apply-chat-template-kwargs. `media` processes images,
    and is None for a text model."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: dict[str, object],
        media: MediaProcessor | None = None,
    ) -> None:
        self._tokenizer, self.options, self._media = tokenizer, options, media

    def whole(self, messages: list[Message], tools: Tools, context: int | None) -> Rendered:
        """Returns the tokens of a conversation with the opening of the model's turn. Raises RequestRejected if the
        template raises an error, or if the text is far longer than `context` tokens."""
        return self._encode(self._render(messages, tools, open_turn=True), messages, context)

    def following(
        self,
        known: list[Message],
        new: list[Message],
        tools: Tools,
        last_token: int | None,
        context: int | None,
    ) -> Rendered:
        """Returns the tokens after the model's turn at the end of `known`: its closing text, the messages of `new`, and
        the opening of the model's next turn.

        `last_token` is the special token with which the model ended the turn, or None if the turn was cut off. If the
        template ends turns with another token (<|end|> where gpt-oss sampled <|return|>), that token is not added.
        Raises BoundaryError if the end of the turn cannot be found, and RequestRejected as `whole` does.
        """
        mark = f"mark{secrets.token_hex(8)}"
        before = [*known[:-1], _marked(known[-1], mark)]
        closed = _after(self._render(before, tools, open_turn=False), mark)
        text = _after(self._render([*before, *new], tools, open_turn=True), mark)
        closing = self._closing(closed, text)
        ended = None if last_token is None else self.special.get(last_token)
        ends = list(self._pattern.finditer(closing))
        if here := next((match for match in ends if match.group() == ended), None):
            rest = text[here.end() :]
        elif ends:
            rest = text[ends[-1].end() if ended else ends[-1].start() :]
        else:
            # The opening of the next message ends the turn, as in GLM-4.5. The model has already sampled the opening.
            rest = text[len(closing) :].removeprefix(ended or "")
        return self._encode(rest, new, context)

    @cached_property
    def special(self) -> dict[int, str]:
        """The texts of the special tokens by id."""
        added = self._tokenizer.added_tokens_decoder
        found = {number: str(token) for number, token in added.items() if token.special}
        ids, texts = self._tokenizer.all_special_ids, self._tokenizer.all_special_tokens
        return found | dict(zip(ids, texts, strict=True))

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        texts = sorted(self.special.values(), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or "(?!)")

    def _closing(self, closed: str, text: str) -> str:
        """Returns the beginning of `text` that closes the turn."""
        if text.startswith(closed):
            return closed
        one, other = self._pattern.search(closed), self._pattern.search(text)
        if one and other and closed[: one.start()] == text[: other.start()]:
            return text[: other.end()]
        raise BoundaryError

    def _render(self, messages: list[Message], tools: Tools, *, open_turn: bool) -> str:
        options = {**self.options, "add_generation_prompt": open_turn}
        error: Exception | None = None
        for write in (_same, _as_text):  # DeepSeek's templates take arguments as text only
            try:
                written = [_with_arguments(message, write) for message in messages]
                return render_chat(written, self._tokenizer, options, tools or None)
            except Exception as raised:  # border: a chat template is a program of the model's author
                error = error or raised
        raise RequestRejected(
            "template",
            f"the chat template must render the messages, got {error}; check their roles and their order",
        ) from error

    def _encode(self, text: str, messages: list[Message], context: int | None) -> Rendered:
        """Returns the tokens of a text, and the messages' images, whose markers are in the text. The tokens of a long
        text are first counted piece by piece, up to twice the context. Without this limit, a text of a few megabytes
        would take seconds, and a text of 60 MB would need more memory than a host has."""
        if context is not None and len(text) > max(_PIECE, 8 * context):
            count = 0
            for start in range(0, len(text), _PIECE):
                count += len(self._ids(text[start : start + _PIECE]))
                if count > 2 * context:
                    raise RequestRejected(
                        "context",
                        f"the context length is {context} tokens, got messages of {len(text)} characters",
                    )
        images = list_images(messages)
        if not images:
            return Rendered(self._ids(text), None)
        if self._media is None:
            raise RequestRejected(
                "media", f"images must go to a model with a vision tower, got {len(images)}; send text only"
            )
        try:
            text, inputs = self._media.expand(text, images)
        except ValueError as error:
            raise RequestRejected("media", str(error)) from error
        ids = self._ids(text)
        return Rendered(ids, self._media.locate(inputs, ids))

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _same(arguments: object) -> object:
    return arguments


def _as_text(arguments: object) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _with_arguments(message: Message, write: Callable[[object], object]) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": write(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _marked(message: Message, mark: str) -> Message:
    """Returns the model's turn with the mark as its content and as the arguments of its calls. Both have the mark,
    because a template may leave out the content or the calls."""
    stand_in: Message = {"role": "assistant", "content": mark}
    if "tool_calls" in message:
        stand_in["tool_calls"] = message["tool_calls"]
    return _with_arguments(stand_in, lambda _: {"value": mark})


def _after(text: str, mark: str) -> str:
    start = text.rfind(mark)
    if start < 0:
        raise BoundaryError
    return text[start + len(mark) :]
