"""Tests requests of strangers, which have any field of any type in each dialect, and any JSON. A request ends at most
its own session, with 400."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from rollout_double import make_args, make_state
from session_double import END, QwenParser, Scripted

from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter, ResponsesAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.sessions import open_session
from slime.types import Sample

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ARGUMENTS = '{"a": 1}'
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "model": "policy",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": "so",
                "reasoning_content": "hm",
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        "tools": [
            {"type": "function", "function": {"name": "add", "description": "sum", "parameters": SCHEMA}}
        ],
        "max_tokens": 9,
        "n": 1,
        "stop": ["x"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "tool_choice": "auto",
    },
    "responses": {
        "model": "policy",
        "instructions": "be brief",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {
                "type": "reasoning",
                "summary": [{"type": "summary_text", "text": "hm"}],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
            {"role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": ARGUMENTS},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
        ],
        "tools": [{"type": "function", "name": "add", "description": "sum", "parameters": SCHEMA}],
        "previous_response_id": None,
        "max_output_tokens": 9,
        "stream": True,
    },
    "messages": {
        "model": "policy",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "be brief"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "so"},
                    {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "content": [{"type": "text", "text": "1"}],
                        "is_error": True,
                    },
                    {"type": "text", "text": "go on"},
                ],
            },
        ],
        "tools": [{"name": "add", "description": "sum", "input_schema": SCHEMA}],
        "stop_sequences": ["x"],
        "stream": True,
    },
}
WRONG: list[Any] = [5, -1.5, True, "text", "", [], [5], [None], [[]], {}, {"a": 5}, {"type": "text"}]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path to each field and entry."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, field in inner:
        yield (*path, name)
        yield from places(field, (*path, name))


def with_value(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    body = copy.deepcopy(body)
    target: Any = body
    for name in path[:-1]:
        target = target[name]
    target[path[-1]] = value
    return body


def deep(levels: int, opening: str = "[", closing: str = "]") -> bytes:
    """Returns a request whose JSON is nested that many levels deep."""
    nested = opening * levels + "1" + closing * levels
    return b'{"model": "policy", "messages": [], "x": ' + nested.encode() + b"}"


def post_all(requests: list[tuple[str, bytes]], headers: dict[str, str] | None = None) -> list[Any]:
    """Returns (status, answer, sample) per request, each in its own session."""
    args = make_args(rollout_max_response_len=400)
    engine = Scripted(lambda _: f"ok{END}")
    state = make_state(args, engine.tokenizer)
    state.engine = engine
    found = []

    async def run() -> None:
        async with aiohttp.ClientSession() as client:
            for index, (path, body) in enumerate(requests):
                sample = Sample(prompt="go", index=index, session_id=f"rollout/{index}")
                async with open_session(args, sample, parser=QwenParser()) as session:
                    sent = {"Authorization": f"Bearer {session.api_key}", **(headers or {})}
                    async with client.post(f"{session.base_url}/{path}", data=body, headers=sent) as answer:
                        text = await answer.text()
                (made,) = session.samples()
                made.check()
                found.append((answer.status, text, made))

    state.run(run())
    return found


@pytest.mark.parametrize("path", BODIES)
def test_a_field_of_a_wrong_type_is_served_or_a_refused_request(path: str) -> None:
    cases = [(place, value) for place in places(BODIES[path]) for value in WRONG]
    bodies = [json.dumps(with_value(BODIES[path], *case)).encode() for case in cases]
    statuses = set()
    for case, (status, text, sample) in zip(cases, post_all([(path, body) for body in bodies]), strict=True):
        ended = sample.metadata["session"]["ended"]
        good = (status, ended) == (200, "done") or (
            status in (400, 404) and ended in ("request", "media", "model", "template")
        )
        assert good, (case, status, text, sample.metadata)
        assert status == 200 or json.loads(text)["error"]["message"], case
        statuses.add(status)
    assert statuses == {200, 400, 404}


@pytest.mark.parametrize("path", BODIES)
def test_tools_that_are_no_functions_are_a_refused_request(path: str) -> None:
    """A chat template would write such a tool into the prompt, or fail."""
    (good,) = BODIES[path]["tools"]
    of_chat = path == "chat/completions"

    def tool(**fields: Any) -> dict[str, Any]:
        return {**good, "function": {**good["function"], **fields}} if of_chat else {**good, **fields}

    schema = "input_schema" if path == "messages" else "parameters"
    named = [tool(name=name) for name in (5, "", None, {}, ["add"])]
    described = [tool(description=5), tool(description={})]
    wrong_schemas = [tool(**{schema: value}) for value in (5, "a", ["a"], [], {"properties": ["a"]})]
    broken = [{}, {"type": "function"}, {"function": {}}, *named, *described, *wrong_schemas]
    cases = [{}, 0, False, "", "add", *([good, each] for each in broken)]
    bodies = [json.dumps({**BODIES[path], "tools": tools}).encode() for tools in cases]
    for tools, (status, text, sample) in zip(cases, post_all([(path, body) for body in bodies]), strict=True):
        assert status == 400 and ("tool" in text or "must be of type" in text), (tools, status, text)
        assert sample.metadata["session"]["ended"] == "request", tools
    for tools in (None, [], [tool(**{schema: None})], [tool(**{schema: {}})], [tool(description=None)]):
        ((status, text, _),) = post_all([(path, json.dumps({**BODIES[path], "tools": tools}).encode())])
        assert status == 200, (tools, text)


BAD_JSON = {
    "deep lists": deep(1_000),
    "very deep lists": deep(200_000),
    "deep objects": deep(1_000, '{"a":', "}"),
    "less deep": deep(101),
    "open": deep(1_000, closing=""),
    "half a pair": rb'{"model": "policy", "messages": [{"role": "user", "content": "cut \ud83d"}]}',
    "half a pair in a name": rb'{"model": "policy", "messages": [], "\udc00": 1}',
    "nan": b'{"model": "policy", "messages": [], "temperature": NaN}',
    "infinity": b'{"model": "policy", "messages": [], "temperature": 1e999}',
    "long number": b'{"model": "policy", "messages": [], "seed": ' + b"9" * 5_000 + b"}",
    "no utf-8": b'{"model": "\xff"}',
    "utf-8 of half a pair": b'{"model": "\xed\xa0\x80"}',
    "nothing": b"",
    "no object": b"[]",
    "text": b"hello",
}


@pytest.mark.parametrize("path", BODIES)
def test_json_that_cannot_be_carried_on_is_a_refused_request(path: str) -> None:
    made = post_all([(path, body) for body in BAD_JSON.values()])
    for name, (status, text, sample) in zip(BAD_JSON, made, strict=True):
        assert status == 400 and json.loads(text)["error"]["message"], (name, status, text)
        assert sample.metadata["session"]["ended"] == "request", name
        assert sample.status is Sample.Status.FAILED and sample.remove_sample


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_that_is_not_what_its_header_names_is_a_refused_request(encoding: str) -> None:
    ((status, _, sample),) = post_all([("messages", b"no archive")], {"Content-Encoding": encoding})
    assert status == 400 and sample.metadata["session"]["ended"] == "request"


ADAPTERS = {"chat/completions": OpenAIAdapter, "responses": ResponsesAdapter, "messages": AnthropicAdapter}


@pytest.mark.parametrize("path", ADAPTERS)
def test_an_adapter_of_slime_refuses_the_same(path: str) -> None:
    """The cases are a field with each wrong type, each JSON, and a body that does not match its header."""
    args = make_args(rollout_max_response_len=400)
    engine = Scripted(lambda _: f"ok{END}")
    make_state(args, engine.tokenizer).engine = engine
    adapter = ADAPTERS[path](tokenizer=None)
    handle = run_app_in_thread(adapter.app)
    url = f"http://127.0.0.1:{handle.port}/v1/{path}"
    field = "input" if path == "responses" else "messages"
    bodies = [json.dumps(with_value(BODIES[path], (field,), value)).encode() for value in (5, [5], {"a": 1})]
    sent: list[tuple[bytes, dict[str, str]]] = [(body, {}) for body in (*bodies, *BAD_JSON.values())]
    sent.append((b"no archive", {"Content-Encoding": "gzip"}))

    async def main() -> None:
        async with aiohttp.ClientSession() as client:
            for number, (body, headers) in enumerate(sent):
                name = f"rollout/{number}"
                key = adapter.open_session(name)
                async with client.post(url, data=body, headers={"x-api-key": key, **headers}) as answer:
                    assert answer.status == 400, (body[:80], await answer.text())
                (sample,) = await adapter.finish_session(
                    name, base_sample=Sample(prompt="go", session_id=name)
                )
                assert sample.status is Sample.Status.FAILED and sample.remove_sample
                sample.check()

    try:
        asyncio.run(main())
    finally:
        handle.stop()
