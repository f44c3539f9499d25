"""The shared code of the three dialects. It reads the fields of a body and formats server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from slime.loss_mask import parameters_rule
from slime.sessions.images import get_content
from slime.sessions.live import LiveAnswer
from slime.sessions.messages import ChatRequest, ModelAnswer, RequestRejected, system_text
from slime.sessions.session import MODEL, Session

T = TypeVar("T")
Body: TypeAlias = dict[str, Any]
"""A JSON object from a client or for a client."""
Event: TypeAlias = tuple[str | None, Body]
"""The name and the data of a server-sent event."""

_SAMPLING = (
    *(
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "logit_bias",
        "frequency_penalty",
        "presence_penalty",
    ),
    *(
        "repetition_penalty",
        "response_format",
        "text",
        "reasoning",
        "reasoning_effort",
        "thinking",
        "logprobs",
    ),
    *("output_config", "chat_template_kwargs"),
)
"""Fields that would change the distribution of the answers, or that are not served."""


@dataclass(frozen=True)
class Dialect:
    """A dialect, which has one route of the server."""

    path: str
    read: Callable[[Body, Session], ChatRequest]
    """Parses a body. Raises RequestRejected for a body that the dialect cannot serve."""
    whole: Callable[[ModelAnswer], Body]
    events: Callable[[LiveAnswer, Body], AsyncIterator[list[Event]]]
    """Yields the events of an answer in batches. The second argument is the request's body. Raises RequestRejected if
    the session ends."""
    failure: Callable[[RequestRejected], Event]
    """Returns the event for an error: its name and its body."""
    last: str = ""
    """The text at the end of a stream."""


def value(body: Body, name: str, kind: type[T], default: T) -> T:
    """Returns a field of a body, or `default` if it is missing or null. Raises RequestRejected for another type."""
    found = body.get(name)
    if found is None:
        return default
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        raise RequestRejected(
            "request", f"{name} must be of type {kind.__name__}, got {found!r:.80}; fix the client"
        )
    return found


def read_request(body: Body, messages: list[Body], tools: list[Body], length: str, stop: str) -> ChatRequest:
    """Reads the fields that all dialects have, and returns the request. `length` and `stop` are the names of the fields
    with the token limit and the stop texts."""
    stops = [] if body.get(stop) in (None, "") else body[stop]
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise RequestRejected(
            "request", f"{stop} must be a text or a list of texts, got {stops!r:.80}; fix the client"
        )
    most = value(body, length, int, 0)
    if most < 0:
        raise RequestRejected("request", f"{length} must be 0 or more, got {most}; leave it out")
    if value(body, "n", int, 1) != 1:
        raise RequestRejected("request", f"n must be 1, got {body['n']}; ask several times")
    ignored = [name for name in _SAMPLING if _is_set(body.get(name))]
    if body.get("tool_choice") not in (None, "auto", {"type": "auto"}):
        ignored.append("tool_choice")
    return ChatRequest(
        model=value(body, "model", str, ""),
        messages=messages,
        tools=tools,
        max_tokens=most or None,
        stop=stops,
        stream=value(body, "stream", bool, False),
        ignored=ignored,
    )


def _is_set(found: object) -> bool:
    return found is not None and found is not False and found != {} and found != []


def objects(values: object, what: str) -> list[Body]:
    """Returns `values` if it is a list of objects. Raises RequestRejected for any other value."""
    if not isinstance(values, list) or not all(isinstance(entry, dict) for entry in values):
        raise RequestRejected(
            "request", f"{what} must be a list of objects, got {values!r:.80}; fix the client"
        )
    return values


def read_objects(body: Body, name: str) -> list[Body]:
    """Returns the list of objects in a body's field, or [] if the field is missing or null. Raises RequestRejected for
    any other value."""
    return [] if body.get(name) is None else objects(body[name], name)


def function_tool(name: object, description: object, parameters: object) -> Body:
    """Returns a tool in the form that chat templates read."""
    if not isinstance(name, str) or not name:
        raise RequestRejected(
            "request", f"a tool must have a name, got {name!r:.80}; only functions are served"
        )
    parsed = {"description": description, "parameters": parameters}
    function: Body = {"name": name}
    if about := value(parsed, "description", str, ""):
        function["description"] = about
    function["parameters"] = value(parsed, "parameters", dict, {}) or {"type": "object", "properties": {}}
    if rule := parameters_rule(function["parameters"]):
        raise RequestRejected("request", f"a tool must {rule}, got {parameters!r:.80}; fix the client")
    return {"type": "function", "function": function}


def simple_message(entry: Body) -> Body:
    """Returns a message with the role system or user. A developer's message gets the role system."""
    role = entry.get("role")
    if role not in ("system", "developer", "user"):
        raise RequestRejected(
            "request", f"role must be system, user, assistant or tool, got {role!r:.80}; fix the client"
        )
    if role == "user":
        return {"role": "user", "content": get_content(entry.get("content"))}
    return {"role": "system", "content": system_text(entry.get("content"))}


def tool_result(entry: Body, content: str, call_id: str) -> Body:
    """Returns a message with the role tool. `content` and `call_id` are the names of the entry's fields."""
    parsed = value(entry, call_id, str, "")
    return {"role": "tool", "content": get_content(entry.get(content)), "tool_call_id": parsed}


def written(event: Event) -> bytes:
    """Returns an event as the bytes of a server-sent event."""
    name, data = event
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


__all__ = [
    "MODEL",
    "ModelAnswer",
    "Body",
    "ChatRequest",
    "Dialect",
    "Event",
    "LiveAnswer",
    "RequestRejected",
    "Session",
]
