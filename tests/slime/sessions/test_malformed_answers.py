"""Tests answers that only a model can write: calls that no parser reads, and arguments that no dialect can carry
unchanged."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest
from session_double import END, converse

from slime.sessions import Session
from slime.sessions.messages import Reply, ToolCall
from slime.types import Sample

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FLAT = {"name": "weather", "parameters": PARAMETERS}
NO_OBJECT = [
    '{"city": "Oslo"',
    "[1, 2]",
    '"Oslo"',
    "null",
    "",
    '{"n": 1e400}',
    '{"n": NaN}',
    '{"a": 1, "a": 2}',
    '{"n": 1.0}',
    '{"n": 123456789012345678901234567890}',
    '{"s": "\\ud800"}',
    '{"s": "\ud800"}',
    '{"city": "Oslo"} trailing',
    '{"a": ' + "[" * 1_200,
    '{"a": ' + "[" * 1_200 + "]" * 1_200 + "}",
]


class Calls:
    """A parser that reads "CALL" and an index of the arguments in `NO_OBJECT`."""

    tools, plain = True, False

    def parse(self, text: str, *_: Any) -> Reply:
        if not text.startswith("CALL"):
            return Reply(text)
        return Reply(None, None, (ToolCall("weather", NO_OBJECT[int(text.removeprefix("CALL"))], "call_1"),))


async def with_messages(session: Session, questions: list[str]) -> None:
    async with anthropic.AsyncAnthropic(
        base_url=session.url, api_key=session.api_key, max_retries=0
    ) as client:
        tool: Any = {"name": "weather", "input_schema": PARAMETERS}
        asked: dict[str, Any] = {"model": session.model, "max_tokens": 100, "tools": [tool]}
        for question in questions:
            said: list[Any] = [{"role": "user", "content": question}]
            answer = await client.messages.create(messages=said, **asked)
            blocks = [block.model_dump(exclude_none=True) for block in answer.content]
            result = {"type": "tool_result", "tool_use_id": blocks[-1]["id"], "content": "again"}
            said += [{"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
            async with client.messages.stream(messages=said, **asked) as events:
                await events.get_final_message()


async def with_chat(session: Session, questions: list[str]) -> None:
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        tool: Any = {"type": "function", "function": FLAT}
        for question in questions:
            said: list[Any] = [{"role": "user", "content": question}]
            answer = await client.chat.completions.create(model="policy", messages=said, tools=[tool])
            message = answer.choices[0].message
            assert message.tool_calls
            said += [message.model_dump(exclude_none=True)]
            said += [{"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "again"}]
            await client.chat.completions.create(model="policy", messages=said, tools=[tool])


async def with_responses(session: Session, questions: list[str]) -> None:
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        tool: Any = {"type": "function", **FLAT}
        for question in questions:
            items: list[Any] = [{"role": "user", "content": question}]
            answer = await client.responses.create(model=session.model, input=items, tools=[tool])
            items += [item.model_dump(exclude_none=True) for item in answer.output]
            items.append({"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "again"})
            await client.responses.create(model=session.model, input=items, tools=[tool])


@pytest.mark.parametrize("talk", [with_messages, with_chat, with_responses])
def test_a_call_whose_arguments_are_no_json_object_is_carried_on_in_one_sample(
    talk: Callable[[Session, list[str]], Awaitable[None]],
) -> None:
    places = range(len(NO_OBJECT))

    def script(prompt: str) -> str:
        question = prompt.split("case ")[1].split(".")[0]
        return (f"sunny{question}" if "again" in prompt else f"CALL{question}") + END

    samples, engine = converse(
        lambda session: talk(session, [f"case {place}." for place in places]), script, parser=Calls()
    )
    record = samples[0].metadata["session"]
    assert (record["ended"], record["prefix_mismatch"]) == ("done", 0)
    for place, sample in zip(places, samples, strict=True):
        written = sample.tokens[-sample.response_length :]
        trained = [token for token, on in zip(written, sample.loss_mask, strict=True) if on]
        assert engine.tokenizer.decode(trained) == f"CALL{place}{END}sunny{place}{END}", NO_OBJECT[place][:80]
        sample.check()


class Raises:
    """A parser with a fault."""

    tools, plain = True, False

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def parse(self, *_: Any) -> Any:
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer


@pytest.mark.parametrize(
    "answer",
    [
        RecursionError("maximum recursion depth exceeded"),
        TypeError("no such field"),
        MemoryError("s_push: parser stack overflow"),
        ValueError("half \ud800"),
        Reply(None, None, (ToolCall("", "{}", "c"),)),
        Reply(None, None, (ToolCall(5, "{}", "c"),)),  # type: ignore[arg-type]
        Reply({"a": 1}),  # type: ignore[arg-type]
        None,
    ],
    ids=repr,
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_the_parser_cannot_read_ends_its_sample_with_the_reason(
    answer: Any, stream: bool
) -> None:
    async def agent(session: Session) -> None:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            said: Any = [{"role": "user", "content": "weather?"}]
            await client.chat.completions.create(model=session.model, messages=said, stream=stream)

    (sample,), engine = converse(agent, lambda _: f"[[[[{END}", parser=Raises(answer))
    record = sample.metadata["session"]
    assert record["ended"] == "parser" and "'[[[['" in record["said"] and record["turns"] == 1
    record["said"].encode()
    assert sample.status is Sample.Status.FAILED and sample.remove_sample
    assert engine.tokenizer.decode(sample.tokens).endswith(f"[[[[{END}")
    sample.check()


def test_a_parser_that_takes_too_long_ends_its_sample_and_not_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some parsers of vLLM take 15 s for 5,000 digits. Other sessions' requests are answered meanwhile."""
    monkeypatch.setattr("slime.sessions.parsing._LONGEST_S", 0.3)
    released = threading.Event()
    beats = 0

    class Slow:
        tools, plain = True, False

        def parse(self, text: str, *_: Any) -> Reply:
            released.wait(30)
            return Reply(text)

    async def agent(session: Session) -> None:
        nonlocal beats
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            said: Any = [{"role": "user", "content": "x"}]
            asking = asyncio.create_task(client.chat.completions.create(model="policy", messages=said))
            while not asking.done():
                beats += 1
                await asyncio.sleep(0.01)
            await asking

    try:
        (sample,), _ = converse(agent, lambda _: f"9999{END}", parser=Slow())
    finally:
        released.set()
    record = sample.metadata["session"]
    assert record["ended"] == "parser" and "must read an answer in 0.3 s" in record["said"]
    assert sample.remove_sample and beats > 10


def test_text_that_has_no_utf8_reaches_clients_as_escapes() -> None:
    """Clients get escapes in each field of an answer, with or without a stream."""
    found: list[Any] = []
    half = "a\ud800"

    class Half:
        tools, plain = True, False

        def parse(self, *_: Any) -> Reply:
            return Reply(half, half, (ToolCall(half, half, half),))

    async def agent(session: Session) -> None:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            said: Any = [{"role": "user", "content": "x"}]
            answer = await client.chat.completions.create(model=session.model, messages=said)
            stream = await client.chat.completions.create(model=session.model, messages=said, stream=True)
            found.extend([answer.choices[0].message, [piece async for piece in stream]])
        async with (
            anthropic.AsyncAnthropic(base_url=session.url, api_key=session.api_key) as other,
            other.messages.stream(model=session.model, max_tokens=9, messages=said) as events,
        ):
            found.append(await events.get_final_message())

    samples, _ = converse(agent, lambda _: f"x{END}", parser=Half())
    assert samples[0].metadata["session"]["ended"] == "done" and len(samples) == 3
    message, _, last = found
    assert message.content == message.tool_calls[0].function.name == "a\\ud800"
    assert last.content[-1].input == {"arguments": "a\\ud800"}


BILLING = "x-anthropic-billing-header: cc_version=2.1.37.{0}; cc_entrypoint=cli; cch={0}{0};"


@pytest.mark.parametrize("form", ["blocks", "text", "message"])
def test_a_line_that_claude_code_changes_in_each_request_does_not_fork(form: str) -> None:
    async def agent(session: Session) -> None:
        async with anthropic.AsyncAnthropic(base_url=session.url, api_key=session.api_key) as client:
            said: list[Any] = []
            for number in ("0a1", "7f3", "c42"):
                line = BILLING.format(number)
                system: Any = [
                    {"type": "text", "text": line},
                    {"type": "text", "text": "You are Claude Code."},
                ]
                if form != "blocks":
                    system = f"{line}\nYou are Claude Code."
                said.append({"role": "user", "content": f"go {number}"})
                if form == "message":
                    asked = [{"role": "system", "content": system}, *said]
                    answer = await client.messages.create(model="policy", max_tokens=9, messages=asked)
                else:
                    answer = await client.messages.create(
                        model="policy", max_tokens=9, messages=said, system=system
                    )
                said.append({"role": "assistant", "content": [b.model_dump() for b in answer.content]})
            await asyncio.sleep(0)

    (sample,), engine = converse(agent, lambda _: f"ok{END}")
    text = engine.tokenizer.decode(sample.tokens)
    assert sample.metadata["session"]["turns"] == 3 and text.count("ok") == 3
    assert "You are Claude Code." in text and "billing" not in text
