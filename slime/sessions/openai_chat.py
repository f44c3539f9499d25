"""OpenAI's POST /v1/chat/completions."""

from __future__ import annotations

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
from slime.sessions.messages import ToolCall, assistant, get_text, tool_call


def read(body: Body, session: Session) -> ChatRequest:
    """Returns the request. Raises RequestRejected for a field that sessions do not serve."""
    entries = dialect.objects(body.get("messages"), "messages")
    tools = []
    for tool in dialect.read_objects(body, "tools"):
        function = dialect.value(tool, "function", dict, {})
        tools.append(
            dialect.function_tool(
                function.get("name"), function.get("description"), function.get("parameters")
            )
        )
    dialect.value(body, "stream_options", dict, {})
    length = "max_completion_tokens" if body.get("max_completion_tokens") else "max_tokens"
    return dialect.read_request(body, list(map(_message, entries)), tools, length, "stop")


def _message(entry: Body) -> Body:
    role = entry.get("role")
    if role == "tool":
        return dialect.tool_result(entry, "content", "tool_call_id")
    if role != "assistant":
        return dialect.simple_message(entry)
    calls = []
    for call in dialect.read_objects(entry, "tool_calls"):
        function = dialect.value(call, "function", dict, {})
        call_id = dialect.value(call, "id", str, "")
        calls.append(tool_call(function.get("name"), function.get("arguments"), call_id))
    names = ("reasoning_content", "reasoning")
    reasoning = next(filter(None, (dialect.value(entry, name, str, "") for name in names)), None)
    return assistant(get_text(entry.get("content")), calls, reasoning)


def _call(call: ToolCall) -> Body:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _usage(answer: ModelAnswer) -> Body:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def whole(answer: ModelAnswer) -> Body:
    """Returns the answer as one object."""
    reply = answer.reply
    message: Body = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = list(map(_call, reply.tool_calls))
    return {
        "id": f"chatcmpl-{answer.id}",
        "object": "chat.completion",
        "created": answer.created,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": answer.finish, "logprobs": None}],
        "usage": _usage(answer),
    }


async def events(live: LiveAnswer, body: Body) -> AsyncIterator[list[Event]]:
    """Yields the answer as the chunks of a stream."""

    def chunk(delta: Body, finish: str | None = None) -> Event:
        return None, {
            "id": f"chatcmpl-{live.id}",
            "object": "chat.completion.chunk",
            "created": live.created,
            "model": MODEL,
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        }

    found = [chunk({"role": "assistant", "content": ""})]
    async for text in live.texts():
        yield [*found, chunk({"content": text})]
        found = []
    answer = await live.answer()
    reply = answer.reply
    if reply.reasoning:
        found.append(chunk({"reasoning_content": reply.reasoning}))
    if rest := live.rest(answer):
        found.append(chunk({"content": rest}))
    for number, call in enumerate(reply.tool_calls):
        found.append(chunk({"tool_calls": [{"index": number, **_call(call)}]}))
    found.append(chunk({}, answer.finish))
    if dialect.value(body, "stream_options", dict, {}).get("include_usage"):
        _, last = chunk({})
        found.append((None, {**last, "choices": [], "usage": _usage(answer)}))
    yield found


def failure(refused: RequestRejected) -> Event:
    """Returns the event for an error."""
    code = "context_length_exceeded" if refused.reason == "context" else refused.reason
    return None, {
        "error": {"message": str(refused), "type": "invalid_request_error", "param": None, "code": code}
    }


CHAT = Dialect("chat/completions", read, whole, events, failure, last="data: [DONE]\n\n")
