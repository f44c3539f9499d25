"""Anthropic's POST /v1/messages."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from slime.sessions import dialect
from slime.sessions.dialect import (
    MODEL,
    Body,
    ChatRequest,
    Dialect,
    Event,
    LiveAnswer,
    ModelAnswer,
    RequestRejected,
    Session,
)
from slime.sessions.json_text import as_object
from slime.sessions.messages import assistant, get_text, system_text, tool_call

_STOP = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


def read(body: Body, session: Session) -> ChatRequest:
    """Returns the request. Raises RequestRejected for a field that sessions do not serve."""
    messages: list[Body] = []
    if system := system_text(body.get("system")):
        messages.append({"role": "system", "content": system})
    for entry in dialect.objects(body.get("messages"), "messages"):
        messages += _assistant(entry) if entry.get("role") == "assistant" else _from_user(entry)
    tools = [
        dialect.function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"))
        for tool in dialect.read_objects(body, "tools")
    ]
    return dialect.read_request(body, messages, tools, "max_tokens", "stop_sequences")


def _blocks(entry: Body) -> list[Body]:
    content = entry.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return dialect.objects(content, "content")


def _assistant(entry: Body) -> list[Body]:
    texts, thoughts, calls = [], [], []
    for block in _blocks(entry):
        kind = block.get("type")
        if kind == "tool_use":
            call_id = dialect.value(block, "id", str, "")
            calls.append(tool_call(block.get("name"), dialect.value(block, "input", dict, {}), call_id))
        elif kind == "thinking":
            thoughts.append(dialect.value(block, "thinking", str, ""))
        elif kind != "redacted_thinking":
            texts.append(get_text([block]))
    return [assistant("".join(texts), calls, "".join(thoughts) or None)]


def _from_user(entry: Body) -> list[Body]:
    """Returns the messages of a user's turn: first a message for each tool result, then the user's text."""
    results: list[Body] = []
    others = []
    for block in _blocks(entry):
        if block.get("type") == "tool_result":
            results.append(dialect.tool_result(block, "content", "tool_use_id"))
        else:
            others.append(block)
    rest = dialect.simple_message({**entry, "content": others})
    return [*results, rest] if others else results


def _content(answer: ModelAnswer) -> list[Body]:
    reply = answer.reply
    found: list[Body] = []
    if reply.reasoning:
        found.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
    if reply.content or not reply.tool_calls:
        found.append({"type": "text", "text": reply.content or ""})
    for call in reply.tool_calls:
        arguments = as_object(call.arguments)
        found.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    return found


def _message(answer: LiveAnswer | ModelAnswer, content: list[Body], stop: str | None, usage: Body) -> Body:
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": content,
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": usage,
    }


def _usage(prompt_tokens: int, cached: int, output_tokens: int) -> Body:
    return {
        "input_tokens": prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": output_tokens,
    }


def _make_usage(answer: ModelAnswer) -> Body:
    return _usage(answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens)


def whole(answer: ModelAnswer) -> Body:
    """Returns the answer as one object."""
    return _message(answer, _content(answer), _STOP[answer.finish], _make_usage(answer))


async def events(live: LiveAnswer, body: Body) -> AsyncIterator[list[Event]]:
    """Yields the answer as the events of a stream. The number of cached tokens is known only at the end."""
    text: Body = {"type": "text", "text": ""}
    started = False
    async for piece in live.texts():
        found = [_delta(0, {**text, "text": piece})]
        if not started:
            opened = _message(live, [], None, _usage(live.prompt_tokens, 0, 0))
            start = _named("content_block_start", index=0, content_block=text)
            found = [_named("message_start", message=opened), start, *found]
            started = True
        yield found
    answer = await live.answer()
    blocks, found = _content(answer), []
    if started:
        rest = live.rest(answer)
        found = [_delta(0, {**text, "text": rest})] if rest else []
        found.append(_named("content_block_stop", index=0))
    else:
        opened = _message(live, [], None, _usage(answer.prompt_tokens, answer.cached_tokens, 0))
        found.append(_named("message_start", message=opened))
    for index, block in enumerate(blocks):
        if index or not started:
            found += _block(index, block)
    stop = {"stop_reason": _STOP[answer.finish], "stop_sequence": None}
    found.append(_named("message_delta", delta=stop, usage=_make_usage(answer)))
    yield [*found, _named("message_stop")]


def _block(index: int, block: Body) -> list[Event]:
    empty: Body = {**block, **{"tool_use": {"input": {}}}.get(block["type"], {block["type"]: ""})}
    return [
        _named("content_block_start", index=index, content_block=empty),
        _delta(index, block),
        _named("content_block_stop", index=index),
    ]


def _delta(index: int, block: Body) -> Event:
    kind = block["type"]
    if kind == "tool_use":
        delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    else:
        delta = {"type": f"{kind}_delta", kind: block[kind]}
    return _named("content_block_delta", index=index, delta=delta)


def _named(name: str, **fields: object) -> Event:
    return name, {"type": name, **fields}


def failure(refused: RequestRejected) -> Event:
    """Returns the event for an error."""
    kind = _ERRORS.get(refused.status, "invalid_request_error")
    message = f"{refused.reason}: {refused}"
    return "error", {"type": "error", "error": {"type": kind, "message": message}}


MESSAGES = Dialect("messages", read, whole, events, failure)
