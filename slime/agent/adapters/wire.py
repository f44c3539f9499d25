"""Functions that plug-ins call on the content of messages and requests. Sessions do not use them: they refuse content
that is no text."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from slime.types import Json, Message

_TEXT = ("text", "input_text", "output_text")
_IMAGE = ("image", "image_url", "input_image")


def flatten_content(c: object) -> str:
    """Returns the text of a message's content: a text, or a list of texts and parts, which are joined by line ends.

    A tool's result is replaced by its content, an image by `[image omitted]`, and another part by its `content` or its
    `text`. Empty parts are left out. Any other value gives `str(value)`, and None gives "".
    """
    if c is None:
        return ""
    if not isinstance(c, list):
        return str(c)
    return "\n".join(filter(None, map(_part_text, c)))


def _part_text(part: object) -> str:
    if not isinstance(part, Mapping):
        return str(part)
    kind = part.get("type")
    if kind in _IMAGE:
        return "[image omitted]"
    if kind in _TEXT or "content" not in part:
        return str(part.get("text") or "")
    return flatten_content(part["content"])


def tool_call_dict(name: str, arguments: dict[str, Json] | None) -> Message:
    """Returns a tool call as chat templates read it. It has no id, so equal calls are equal."""
    return {"type": "function", "function": {"name": name, "arguments": arguments or {}}}


def manager_finish_reason(tool_uses: list[Message], raw_finish: str) -> str:
    """Returns "tool_calls" for an answer with tool calls, else the engine's reason, or "stop" without one."""
    return "tool_calls" if tool_uses else raw_finish or "stop"


def sid_from_bearer(request: web.Request) -> str | None:
    """Returns the text after `Bearer ` in a request's Authorization header, or None."""
    kind, _, text = request.headers.get("Authorization", "").partition(" ")
    return text.strip() or None if kind.lower() == "bearer" else None


def sid_from_body(body: Mapping[str, Json] | None) -> str | None:
    """Returns the session's name in a request of OpenAI's client: `metadata.session_id`, else `user`, or None."""
    if not body:
        return None
    metadata = body.get("metadata")
    found = (metadata.get("session_id") if isinstance(metadata, dict) else None) or body.get("user")
    return str(found) if found else None
