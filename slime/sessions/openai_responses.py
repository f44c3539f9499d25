"""OpenAI's POST /v1/responses."""

from __future__ import annotations

from collections.abc import AsyncIterator

from slime.sessions import dialect, openai_chat
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
from slime.sessions.messages import ToolCall, assistant, get_text, system_text, tool_call


def read(body: Body, session: Session) -> ChatRequest:
    """Returns the request. With `previous_response_id`, the request starts with the messages of an earlier answer.
    Raises RequestRejected for a field that sessions do not serve."""
    body_input = body.get("input")
    entries = [{"role": "user", "content": body_input}] if isinstance(body_input, str) else body_input
    messages = _messages(dialect.objects(entries, "input"))
    if earlier := dialect.value(body, "previous_response_id", str, ""):
        before = session.get_messages(earlier.removeprefix("resp_"))
        messages = [*(m for m in before if m["role"] != "system" or not body.get("instructions")), *messages]
    if instructions := system_text(body.get("instructions")):
        messages.insert(0, {"role": "system", "content": instructions})
    tools = []
    for tool in dialect.read_objects(body, "tools"):
        if tool.get("type") != "function":
            raise RequestRejected(
                "request", f"tools must be functions, got {tool.get('type')!r:.80}; leave others out"
            )
        tools.append(dialect.function_tool(tool.get("name"), tool.get("description"), tool.get("parameters")))
    return dialect.read_request(body, messages, tools, "max_output_tokens", "stop")


def _messages(items: list[Body]) -> list[Body]:
    """Returns chat messages. In this API, an answer's reasoning, text and calls are separate items. This function
    merges them into one assistant's message."""
    found: list[Body] = []
    for item in items:
        kind = item.get("type") or "message"
        if kind == "function_call_output":
            found.append(dialect.tool_result(item, "output", "call_id"))
        elif kind == "function_call":
            call_id = dialect.value(item, "call_id", str, "")
            call = tool_call(item.get("name"), item.get("arguments"), call_id)
            _join(found, assistant("", [call]))
        elif kind == "reasoning":
            texts = (
                get_text(item.get(name), ("reasoning_text", "summary_text"))
                for name in ("content", "summary")
            )
            thoughts = "".join(texts)
            _join(found, assistant("", [], thoughts))
        elif kind == "message" and item.get("role") == "assistant":
            _join(found, assistant(get_text(item.get("content")), []))
        elif kind == "message":
            found.append(dialect.simple_message(item))
        else:
            raise RequestRejected(
                "request", f"an input item must be one that is served, got type {kind!r:.80}; leave it out"
            )
    return found


def _join(found: list[Body], part: Body) -> None:
    """Adds a part of an assistant's turn to the last message, if the last message belongs to the same turn."""
    if not found or found[-1]["role"] != "assistant":
        found.append(part)
        return
    turn = found[-1]
    thoughts = turn.get("reasoning_content", "") + part.get("reasoning_content", "")
    calls = [*turn.get("tool_calls", []), *part.get("tool_calls", [])]
    found[-1] = assistant(turn["content"] + part["content"], calls, thoughts)


def _call(answer: ModelAnswer, number: int, call: ToolCall) -> Body:
    return {
        "type": "function_call",
        "id": f"fc_{answer.id}_{number}",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def _output(answer: ModelAnswer) -> list[Body]:
    reply = answer.reply
    found: list[Body] = []
    if reply.reasoning:
        thought = {"type": "reasoning_text", "text": reply.reasoning}
        found.append({"type": "reasoning", "id": f"rs_{answer.id}", "summary": [], "content": [thought]})
    if reply.content or not reply.tool_calls:
        found.append(_text_item(answer, reply.content or ""))
    return found + [_call(answer, number, call) for number, call in enumerate(reply.tool_calls)]


def _text_item(answer: LiveAnswer | ModelAnswer, text: str) -> Body:
    return {
        "type": "message",
        "id": f"msg_{answer.id}",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }


def _response(
    answer: LiveAnswer | ModelAnswer, status: str, output: list[Body], cached: int, written: int
) -> Body:
    cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "model": MODEL,
        "output": output,
        "error": None,
        "incomplete_details": cut,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "temperature": None,
        "top_p": None,
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + written,
        },
    }


def _status(answer: ModelAnswer) -> str:
    return "incomplete" if answer.finish == "length" else "completed"


def whole(answer: ModelAnswer) -> Body:
    """Returns the answer as one object."""
    counts = answer.cached_tokens, answer.completion_tokens
    return _response(answer, _status(answer), _output(answer), *counts)


async def events(live: LiveAnswer, body: Body) -> AsyncIterator[list[Event]]:
    """Yields the answer as the events of a stream."""
    steps = _Steps()
    opened = _response(live, "in_progress", [], 0, 0) | {"usage": None}
    steps.add("response.created", response=opened)
    steps.add("response.in_progress", response=opened)
    started = False
    async for text in live.texts():
        if not started:
            steps.open(0, _text_item(live, ""))
            started = True
        steps.text(0, f"msg_{live.id}", text)
        yield steps.take()
    answer = await live.answer()
    for index, item in enumerate(_output(answer)):
        at = {"item_id": item["id"], "output_index": index}
        if not started:
            steps.open(index, item)
        if item["type"] == "function_call":
            steps.add("response.function_call_arguments.delta", **at, delta=item["arguments"])
            done = {"arguments": item["arguments"], "name": item["name"]}
            steps.add("response.function_call_arguments.done", **at, **done)
        elif item["type"] == "reasoning":
            (part,) = item["content"]
            steps.add("response.reasoning_text.delta", **at, content_index=0, delta=part["text"])
            steps.add("response.reasoning_text.done", **at, content_index=0, text=part["text"])
        else:
            (part,) = item["content"]
            steps.text(index, item["id"], live.rest(answer))
            steps.add("response.output_text.done", **at, content_index=0, text=part["text"], logprobs=[])
            steps.add("response.content_part.done", **at, content_index=0, part=part)
        steps.add("response.output_item.done", output_index=index, item=item)
        started = False
    steps.add(f"response.{_status(answer)}", response=whole(answer))
    yield steps.take()


class _Steps:
    """Collects the numbered events of one stream."""

    def __init__(self) -> None:
        self._number = 0
        self._waiting: list[Event] = []

    def add(self, kind: str, **fields: object) -> None:
        self._waiting.append((kind, {"type": kind, "sequence_number": self._number, **fields}))
        self._number += 1

    def open(self, index: int, item: Body) -> None:
        """Adds the events that begin an output item and, for a message, its part."""
        empty: Body = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        self.add("response.output_item.added", output_index=index, item={**item, **empty})
        if item["type"] == "message":
            part = {**item["content"][0], "text": ""}
            at = {"item_id": item["id"], "output_index": index, "content_index": 0}
            self.add("response.content_part.added", **at, part=part)

    def text(self, index: int, item_id: str, text: str) -> None:
        if text:
            at = {"item_id": item_id, "output_index": index, "content_index": 0}
            self.add("response.output_text.delta", **at, delta=text, logprobs=[])

    def take(self) -> list[Event]:
        """Returns the events that no earlier call has returned."""
        taken, self._waiting = self._waiting, []
        return taken


def failure(refused: RequestRejected) -> Event:
    """Returns the event for an error."""
    _, data = openai_chat.failure(refused)
    return "error", {"type": "error", "sequence_number": 0, **data["error"], **data}


RESPONSES = Dialect("responses", read, whole, events, failure)
