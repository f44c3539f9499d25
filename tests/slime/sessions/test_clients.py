"""Unmodified clients use a session in three dialects, and every token becomes part of a sample."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest
from session_double import CALL, END, converse

from slime.sessions import Session
from slime.types import Sample

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
CHAT_TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "description": "sum", "parameters": PARAMETERS},
}
FLAT_TOOL: Any = {"type": "function", "name": "add", "description": "sum", "parameters": PARAMETERS}
MESSAGES_TOOL: Any = {"name": "add", "description": "sum", "input_schema": PARAMETERS}
THOUGHT = "<think>I add</think>"


def script(prompt: str) -> str:
    return f"it is 3{END}" if "<tool_response>3" in prompt else THOUGHT + CALL + END


def add(arguments: str | dict[str, int]) -> str:
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    return str(given["a"] + given["b"])


async def with_chat(session: Session, stream: bool) -> str:
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        assert [model.id async for model in client.models.list()] == [session.model]
        messages: list[Any] = [{"role": "user", "content": "1+2?"}]
        while True:
            asked: dict[str, Any] = {"model": session.model, "messages": messages, "tools": [CHAT_TOOL]}
            if stream:
                async with client.chat.completions.stream(
                    **asked, stream_options={"include_usage": True}
                ) as events:
                    answer = await events.get_final_completion()
            else:
                answer = await client.chat.completions.create(**asked, temperature=0.2)
            message = answer.choices[0].message
            assert answer.usage is not None and answer.usage.completion_tokens > 0
            if not message.tool_calls:
                assert answer.choices[0].finish_reason == "stop"
                return message.content or ""
            assert answer.choices[0].finish_reason == "tool_calls"
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            for call in message.tool_calls:
                said = add(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": said})


async def with_responses(session: Session, stream: bool) -> str:
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        items: list[Any] = [{"role": "user", "content": "1+2?"}]
        previous: Any = openai.omit
        while True:
            asked: dict[str, Any] = {"model": session.model, "input": items, "tools": [FLAT_TOOL]}
            if stream:
                async with client.responses.stream(**asked) as events:
                    answer = await events.get_final_response()
            else:
                answer = await client.responses.create(**asked, previous_response_id=previous)
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                return answer.output_text
            results: list[Any] = [
                {"type": "function_call_output", "call_id": call.call_id, "output": add(call.arguments)}
                for call in calls
            ]
            if stream:
                items = [*items, *(item.model_dump(exclude_none=True) for item in answer.output), *results]
            else:
                items, previous = results, answer.id


async def with_messages(session: Session, stream: bool) -> str:
    async with anthropic.AsyncAnthropic(base_url=session.url, api_key=session.api_key) as client:
        messages: list[Any] = [{"role": "user", "content": "1+2?"}]
        while True:
            asked: dict[str, Any] = {
                "model": session.model,
                "max_tokens": 300,
                "messages": messages,
                "tools": [MESSAGES_TOOL],
            }
            if stream:
                async with client.messages.stream(**asked) as events:
                    answer = await events.get_final_message()
            else:
                answer = await client.messages.create(**asked)
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                assert answer.stop_reason == "end_turn"
                return "".join(block.text for block in answer.content if block.type == "text")
            assert answer.stop_reason == "tool_use"
            messages.append(
                {"role": "assistant", "content": [block.model_dump() for block in answer.content]}
            )
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": add(call.input)} for call in calls
            ]
            messages.append({"role": "user", "content": results})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("talk", [with_chat, with_responses, with_messages])
def test_a_client_calls_a_tool_and_all_tokens_are_in_the_sample(talk: Any, stream: bool) -> None:
    said: list[str] = []

    async def agent(session: Session) -> None:
        said.append(await talk(session, stream))

    (sample,), engine = converse(agent, script)
    assert said == ["it is 3"]
    first, second = engine.prompts
    calls, answer = (engine.tokenizer.encode(text) for text in (THOUGHT + CALL + END, "it is 3" + END))
    # The thoughts are included, which templates leave out.
    assert second[: len(first) + len(calls)] == first + calls
    assert sample.tokens == second + answer
    trained = [
        t for t, on in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True) if on
    ]
    assert trained == calls + answer
    values = [v for v, on in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if on]
    assert values == [-0.01 * (n + 1) for text in (calls, answer) for n in range(len(text))]
    assert sample.status is Sample.Status.COMPLETED and sample.weight_versions == [0]
    between = engine.tokenizer.decode(second[len(first) + len(calls) :])
    assert (
        between == "\n<|im_start|>user\n<tool_response>3</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    record = sample.metadata["session"]
    assert (record["ended"], record["turns"], record["tool_calls"]) == ("done", 2, 1)
    assert (record["samples"], record["prefix_mismatch"]) == (1, 0)
    assert record["ignored"] == (["temperature"] if talk is with_chat and not stream else [])
    sample.check()
    assert len(engine.sessions) == 1 and None not in engine.sessions
    assert sample.prefix_cache_info.total_prompt_tokens == len(first) + len(second)
