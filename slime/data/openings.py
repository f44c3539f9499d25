"""Finds the beginning of a chat template's text, and checks if the template reads tools. Owns the warnings about
prompts that a template renders without an error, but into another text than the user expects."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from slime.data.files import Row, RowLocation
from slime.data.rows import OWN_KEYS, RowColumns, message_text, render_chat, to_prompt
from slime.types import Message, Tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

OWN_COLUMNS = (
    "columns %s are not in sample.metadata, where a run writes these keys itself; give them other names"
)
DOUBLED = (
    "the prompt begins with %r, and so does the chat template, so that the model reads it twice; leave "
    "--apply-chat-template off, or write the prompts without the template"
)
JSON_TEXT = (
    "column %r has the JSON text of a list of messages, which the model reads as the text of one user turn; write the "
    "list itself"
)
UNREAD_TOOLS = (
    "the prompt has %d tools, and the chat template does not read tools, so that the model does not see them; take a "
    "template that reads `tools`, or describe them in the messages"
)
SESSION_DOUBLED = (
    "a message of a session begins with %r, and so does the chat template, so that the model reads it twice; leave "
    "--apply-chat-template off, so that sample.prompt is the text of the data"
)
SESSION_TOOLS = (
    "a client of a session gave %d tools, and the chat template does not read tools, so that the model does not see "
    "them; take a model whose template reads `tools`, or describe them in the messages"
)
_MARK = "vime-mark"
_TOOL: Tools = [
    {
        "type": "function",
        "function": {"name": _MARK, "description": _MARK, "parameters": {"type": "object", "properties": {}}},
    }
]
_PROBE: list[Message] = [{"role": "user", "content": "x"}]
_SYSTEM: Message = {"role": "system", "content": _MARK}
_USER: Message = {"role": "user", "content": _MARK}


class ChatTemplate:
    """The chat template of a tokenizer with --apply-chat-template-kwargs."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: dict[str, object]) -> None:
        self._tokenizer, self._options = tokenizer, options

    @functools.cached_property
    def openings(self) -> list[str]:
        """Returns the texts with which a rendered conversation begins: the text before the first user's or system's
        message, and the first special token."""
        found = set()
        for messages in ([_USER], [_SYSTEM, *_PROBE]):
            before, mark, _ = self._render(messages, None).partition(_MARK)
            if mark and before.strip():
                found.add(before.strip())
                found.update(token for token in self._special if before.lstrip().startswith(token))
        return sorted(found, key=len)

    @functools.cached_property
    def reads_tools(self) -> bool:
        """Returns True if the model reads a conversation's tools, or if the template cannot render a conversation."""
        text = self._render(_PROBE, _TOOL)
        return not text or text != self._render(_PROBE, None)

    def doubled(self, contents: Iterable[str]) -> str | None:
        """Returns the opening of the first content that begins with an opening, or None."""
        return next(
            (one for text in contents for one in self.openings if text.lstrip()[: len(one)] == one),
            None,
        )

    @functools.cached_property
    def _special(self) -> list[str]:
        added = getattr(
            self._tokenizer, "added_tokens_decoder", {}
        ).values()  # Mistral's own tokenizer lacks it
        return sorted(
            {str(token) for token in added if token.special}
            | set(getattr(self._tokenizer, "all_special_tokens", ()))
        )

    def _render(self, messages: list[Message], tools: Tools | None) -> str:
        try:
            return render_chat(messages, self._tokenizer, self._options, tools)
        except Exception:  # border: a chat template is a program of the model's author
            return ""


def get_contents(prompt: str | Sequence[Message]) -> list[str]:
    """Returns the text of a prompt, or the texts of its messages."""
    if isinstance(prompt, str):
        return [prompt]
    return [text for message in prompt if isinstance(text := message.get("content"), str)]


def warn_about_rows(
    first: Iterable[tuple[RowLocation, Row]], columns: RowColumns, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Logs one warning per kind of problem in the first rows of a file that raises no error: a column with the name of
    a key that a run writes, a prompt that begins as the chat template does, and tools that the template does not read.
    The last two kinds need a tokenizer."""
    plain, warned = dataclasses.replace(columns, apply_chat_template=False), set[str]()
    template = None if tokenizer is None else ChatTemplate(tokenizer, columns.apply_chat_template_kwargs)

    def warn(name: str, found: object, text: str) -> None:
        if found and name not in warned:
            warned.add(name)
            logger.warning("%s: " + text, where, found)

    for where, row in first:
        filled = {name for name, value in row.items() if value is not None}
        warn("columns", ", ".join(sorted(filled & OWN_KEYS - columns.used)), OWN_COLUMNS)
        prompt = to_prompt(row, where, plain, None)
        if template is None or (isinstance(prompt.text, str) and not columns.apply_chat_template):
            continue
        raw = row.get(columns.input_key)
        warn("lists", where.source.suffix != ".csv" and message_text(raw) and columns.input_key, JSON_TEXT)
        warn("opening", template.doubled(get_contents(prompt.text)), DOUBLED)
        tools = prompt.metadata.get("tools")
        warn("tools", tools and not template.reads_tools and len(tools), UNREAD_TOOLS)


class ChatRemarks:
    """Warnings about chat templates. A run logs each warning once, at the first request of a session with the
    problem."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._templates: dict[str, ChatTemplate] = {}
        self._warned: set[str] = set()

    def look(self, messages: list[Message], tools: Tools | None, options: dict[str, object]) -> None:
        """Logs a warning for messages that begin as the template does, and for tools that the template does not
        read."""
        key = json.dumps(options, sort_keys=True, default=str)
        template = self._templates.setdefault(key, ChatTemplate(self._tokenizer, options))
        self._once("opening", lambda: template.doubled(get_contents(messages)), SESSION_DOUBLED)
        self._once("tools", lambda: tools and not template.reads_tools and len(tools), SESSION_TOOLS)

    def _once(self, name: str, find: Callable[[], object], text: str) -> None:
        if name not in self._warned and (found := find()):
            self._warned.add(name)
            logger.warning(text, found)
