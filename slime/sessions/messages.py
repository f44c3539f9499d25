"""Converts the chat messages of every dialect to the form that chat templates of Hugging Face read.

A message has a `role` (system, user, assistant, tool) and a `content`. The content is a text. The content of a user or
a tool may also be a list of text parts and images (slime.sessions.images). An assistant's message may have
`tool_calls` ({"id", "type": "function", "function": {"name", "arguments"}}, where `arguments` is an object) and
`reasoning_content`. A tool's message has `tool_call_id`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Protocol

from slime.sessions.json_text import as_object, as_unicode
from slime.types import Message, Tools

_TEXT = ("text", "input_text", "output_text")
"""The types of text parts."""
_BILLING = re.compile(r"^x-anthropic-billing-header:.*\n?", re.MULTILINE)
"""A line in the system prompt of Claude Code. It differs in every request."""


class RequestRejected(Exception):
    """The error of a request that ends its session. The samples record `reason`, and `status` is the HTTP status."""

    def __init__(self, reason: str, text: str, status: int = 400) -> None:
        super().__init__(as_unicode(text))
        self.reason, self.status = reason, status


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote. `arguments` is the model's text, which should be JSON."""

    name: str
    arguments: str
    id: str


@dataclass(frozen=True)
class Reply:
    """A parsed answer of the model."""

    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class ModelAnswer:
    """The answer for a client, before a dialect formats it."""

    id: str
    reply: Reply
    finish: str
    """stop, length or tool_calls."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    created: int


class ChatParser(Protocol):
    """Parses the model's text. The backend provides the parser, because the formats depend on the engine.

    If a parser has a true attribute `plain`, the content is the text, so a client may get the text before the answer is
    complete.
    """

    tools: bool
    """True if the parser finds tool calls."""

    def parse(
        self, text: str, token_ids: list[int], prompt_ids: list[int], messages: list[Message], tools: Tools
    ) -> Reply:
        """Parses the answer `text` and `token_ids`, without its end-of-turn token. `prompt_ids` precede the answer."""
        ...


class PlainParser:
    """A parser that returns the whole text as the content."""

    tools, plain = False, True

    def parse(
        self, text: str, token_ids: list[int], prompt_ids: list[int], messages: list[Message], tools: Tools
    ) -> Reply:
        return Reply(text)


@dataclass
class ChatRequest:
    """A request, in the form that all three dialects share."""

    model: str
    messages: list[Message]
    tools: Tools = field(default_factory=list)
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    stream: bool = False
    ignored: list[str] = field(default_factory=list)
    """Fields that have no effect, because they would change the distribution that the trainer assumes."""
    size: int = 0
    """Size of the request's body in bytes."""


def get_text(content: object, kinds: tuple[str, ...] = _TEXT) -> str:
    """Returns the text of a message's content, which is a text or a list of text parts. Raises RequestRejected for an
    image or another part."""
    return "".join(_parts(content, kinds))


def system_text(content: object) -> str:
    """Returns the text of a system prompt, without the line that Claude Code changes in each request."""
    return "".join(_BILLING.sub("", part) for part in _parts(content, _TEXT))


def _parts(content: object, kinds: tuple[str, ...]) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise RequestRejected(
            "request",
            f"content must be a text or a list of parts, got {type(content).__name__}; fix the client",
        )
    found = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if isinstance(part, str):
            found.append(part)
        elif kind in kinds and isinstance(part.get("text"), str):
            found.append(part["text"])
        elif "image" in str(kind) or "audio" in str(kind) or "file" in str(kind):
            raise RequestRejected(
                "media",
                f"content must be text, or images of a user or a tool, got a part of type {kind!s:.80}; leave it out",
            )
        else:
            raise RequestRejected("request", f"a content part must be text, got {kind!r:.80}; leave it out")
    return found


def tool_call(name: object, arguments: object, call_id: str) -> dict[str, object]:
    """Returns a call in the form that chat templates read."""
    if not isinstance(name, str) or not name:
        raise RequestRejected("request", f"a tool call must have a name, got {name!r:.80}; fix the client")
    parsed = as_object(arguments) if isinstance(arguments, str) else {} if arguments is None else arguments
    if not isinstance(parsed, dict):
        raise RequestRejected(
            "request", f"the arguments of a tool call must be an object, got {parsed!r:.80}; fix the client"
        )
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": parsed}}


def assistant(content: str | None, calls: list[dict[str, object]], reasoning: str | None = None) -> Message:
    """Returns an assistant's message. Templates check for the key `tool_calls`, so an empty list is left out."""
    message: Message = {"role": "assistant", "content": content or ""}
    if calls:
        message["tool_calls"] = calls
    if reasoning:
        message["reasoning_content"] = reasoning
    return message


def from_reply(reply: Reply) -> Message:
    calls = [tool_call(call.name, call.arguments, call.id) for call in reply.tool_calls]
    return assistant(reply.content, calls, reply.reasoning)


def same(ours: Message, theirs: Message) -> bool:
    """Returns whether the client's message equals the stored message. For an assistant's message, the comparison
    ignores reasoning, call ids and space around the content, because clients remove or replace them."""
    if ours["role"] != theirs["role"]:
        return False
    if ours["role"] != "assistant":
        return bool(ours == theirs)
    return _normalise(ours) == _normalise(theirs)


def _normalise(message: Message) -> tuple[str, list[object]]:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return message["content"].strip(), calls
