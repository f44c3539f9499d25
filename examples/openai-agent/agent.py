"""An agent with a calculator, over OpenAI's unmodified client.

    PYTHONPATH=examples/openai-agent vime train ... --custom-generate-function-path agent.generate \
        --custom-rm-path agent.score

An untrained model writes no JSON. Therefore `FirstTokenCalls` treats an answer whose first token has an odd id as a
call of the calculator. For a real model, use the parser of its family: leave `parser` out, and set
--vllm-tool-call-parser.
"""

from __future__ import annotations

import asyncio
import functools
import json
from typing import Any

import openai

from slime.sessions import open_session
from slime.sessions.messages import Reply, ToolCall
from slime.utils.types import Sample

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "The value of a sum.",
        "parameters": {"type": "object", "properties": {"sum": {"type": "string"}}, "required": ["sum"]},
    },
}


@functools.cache
def connections(loop: asyncio.AbstractEventLoop) -> Any:
    """Returns the HTTP client that all samples in an event loop share. Its creation blocks the loop."""
    return openai.DefaultAsyncHttpxClient()


async def solve(client: openai.AsyncOpenAI, model: str, question: str) -> None:
    """Sends requests until the model answers without a call, at most two requests."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(2):
        answer = await client.chat.completions.create(model=model, messages=messages, tools=[TOOL])
        message = answer.choices[0].message
        if not message.tool_calls:
            return
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            first, _, second = json.loads(call.function.arguments)["sum"].rstrip("=").partition("+")
            result = str(int(first) + int(second))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Runs one agent and returns its samples."""
    parser, http = FirstTokenCalls(sample.prompt), connections(asyncio.get_running_loop())
    async with open_session(args, sample, sampling_params, parser=parser) as session:
        client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=http)
        await solve(client, session.model, sample.prompt)
    return session.samples()


async def score(args: Any, samples: list[Sample], **kwargs: Any) -> list[float]:
    """Returns 1 for an agent whose model called the tool, else 0."""
    return [float(samples[0].metadata["session"]["tool_calls"] > 0)] * len(samples)


class FirstTokenCalls:
    """A `slime.sessions.messages.ChatParser` for an untrained model."""

    tools = True

    def __init__(self, question: str) -> None:
        self.arguments = json.dumps({"sum": question})

    def parse(self, text: str, token_ids: list[int], *_: object) -> Reply:
        called = token_ids[0] % 2 == 1
        return Reply(text, None, (ToolCall("calculator", self.arguments, "call_1"),) if called else ())
