"""Streams an answer while the model generates it. Only text that later tokens cannot change is streamed."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Container, Sequence
from typing import TYPE_CHECKING, TypedDict

from slime.protocols import GenerateResult, OnTokens
from slime.sessions.messages import ModelAnswer, RequestRejected

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HALF = "\ufffd"
"""The character that a decoder returns for bytes that are not yet a complete character."""


class ShownTokens(TypedDict, total=False):
    """The argument of an engine request whose answer is streamed to the client."""

    on_tokens: OnTokens


class TextSoFar:
    """Decodes tokens incrementally. The returned pieces together are a prefix of the text that `decode` returns for all
    tokens.

    A special token is held back until another token follows, because a token that ends the turn is not text. The last
    `hold` characters are also held back, because they may be the beginning of a text that stops the answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special: Container[int], hold: int = 0) -> None:
        self._tokenizer, self._special, self._hold = tokenizer, special, hold
        self._ids: list[int] = []
        self._start = self._read = 0
        """The tokens of [start, read) are decoded again with new tokens, because spaces may depend on the context."""
        self._held = ""

    def add(self, token_ids: Sequence[int]) -> str:
        """Adds tokens and returns the new text."""
        self._ids += token_ids
        end = len(self._ids)
        if end and self._ids[-1] in self._special:
            end -= 1
        before = self._decode(self._ids[self._start : self._read])
        text = self._decode(self._ids[self._start : end])
        if end > self._read and len(text) > len(before) and not text.endswith(_HALF):
            self._held += text[len(before) :]
            self._start, self._read = self._read, end
        cut = len(self._held) - self._hold
        if cut <= 0:
            return ""
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))


class LiveAnswer:
    """An answer that is being generated. The server calls `follow`. The events of a stream then come from `texts` and
    `answer`."""

    def __init__(self, ended: Callable[[], str | None] = lambda: None) -> None:
        """Makes an answer without text. `ended` returns the reason why the session has ended, or None."""
        self._ended = ended
        self.id, self.created = secrets.token_hex(12), int(time.time())
        self.prompt_tokens = 0
        self.sent = ""
        """The text that `texts` has yielded."""
        self._task: asyncio.Task[ModelAnswer] | None = None
        self._text: TextSoFar | None = None
        self._ids: list[int] = []
        self._ready = ""
        self._news = asyncio.Event()

    def follow(self, task: asyncio.Task[ModelAnswer]) -> None:
        """Sets the task that returns the answer."""
        self._task = task
        task.add_done_callback(lambda _: self._news.set())

    def show(self, text: TextSoFar) -> None:
        """Lets `texts` yield text from now on. Without this call, `texts` is empty."""
        self._text = text

    def on_tokens(self, index: int, token_ids: list[int], log_probs: list[float]) -> None:
        """Implements `slime.protocols.OnTokens`. Ignores tokens that are repeated because another engine has taken over
        the request."""
        if self._text is None or index + len(token_ids) <= len(self._ids):
            return
        new = token_ids[len(self._ids) - index :]
        self._ids += new
        self._ready += self._text.add(new)
        if self._ready:
            self._news.set()

    def check(self, result: GenerateResult) -> None:
        """Raises RequestRejected if the streamed tokens are not the beginning of the result. This happens if an engine
        dies and the next engine samples other tokens. The rollout then draws the sample again."""
        if result.token_ids[: len(self._ids)] != self._ids:
            raise RequestRejected(
                "aborted", "an engine ended in the middle of an answer that was being streamed", 403
            )

    async def texts(self) -> AsyncIterator[str]:
        """Yields pieces of the text until the answer is complete. `rest` returns the text after these pieces."""
        assert self._task is not None
        while True:
            await self._news.wait()
            self._news.clear()
            if self._task.done():
                return
            piece, self._ready = self._ready, ""
            self.sent += piece
            yield piece

    async def answer(self) -> ModelAnswer:
        """Waits for the whole answer and returns it. Raises RequestRejected if the session has ended meanwhile."""
        assert self._task is not None
        await asyncio.wait({self._task})
        if self._task.cancelled():
            reason = self._ended() or "done"
            raise RequestRejected(reason, f"the session has ended: {reason}", 403)
        return self._task.result()

    def rest(self, answer: ModelAnswer) -> str:
        """Returns the content after `sent`. Raises RequestRejected if the content does not begin with `sent`."""
        content = answer.reply.content or ""
        if not content.startswith(self.sent):
            raise RequestRejected(
                "engine",
                f"the text of an answer must begin as it was streamed, got {content[:80]!r} after {self.sent[:80]!r}; "
                "ask without stream",
            )
        return content[len(self.sent) :]
