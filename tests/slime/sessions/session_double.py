"""Provides an engine with scripted answers, a parser of Qwen's tool calls, and a session in its own event loop."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rollout_double import EngineDouble, make_args, make_state, make_tokenizer

from slime.protocols import GenerateResult, OnTokens
from slime.sessions import Session, SessionLimits, open_session
from slime.sessions.messages import ChatParser, Reply, ToolCall
from slime.types import Sample

TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.role == 'tool' %}</tool_response>{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
END = "<|im_end|>"


class Scripted(EngineDouble):
    """Generates `script(prompt)`, one token per byte. A text without END was cut off. `gate`, if set, holds answers
    back. With `streams`, `shown` is awaited after each token."""

    def __init__(self, script: Callable[[str], str]) -> None:
        super().__init__(make_tokenizer(TOOLS))
        self.script = script
        self.gate: asyncio.Event | None = None
        self.shown: Callable[[int], Awaitable[Any]] = lambda _: asyncio.sleep(0)
        self.prompts: list[list[int]] = []
        self.sessions: set[str | None] = set()

    async def generate(
        self,
        token_ids: list[int],
        sampling_params: dict[str, Any],
        *,
        seed: int,
        deadline_s: float,
        columns: Mapping[str, int],
        session: str | None = None,
        on_tokens: OnTokens | None = None,
    ) -> GenerateResult:
        self.prompts.append(token_ids)
        self.sessions.add(session)
        prompt = self.tokenizer.decode(token_ids)
        self.calls.append((prompt, sampling_params, seed))
        if self.gate is not None:
            await self.gate.wait()
        said = self.script(prompt)
        ids = self.tokenizer.encode(said, add_special_tokens=False)
        ids, cut = ids[: sampling_params["max_new_tokens"]], len(ids) > sampling_params["max_new_tokens"]
        reason = "length" if cut or not said.endswith(END) else "stop"
        values = [-0.01 * (n + 1) for n in range(len(ids))]
        text = self.tokenizer.decode(ids)
        for place in range(len(ids) if on_tokens else 0):
            on_tokens(place, ids[place : place + 1], values[place : place + 1])
            await self.shown(place)
        return GenerateResult(ids, values, text, reason, [self.version], len(token_ids), len(token_ids) // 2)


class QwenParser:
    """Parses reasoning in <think> and calls in <tool_call>."""

    tools, plain = True, False

    def parse(self, text: str, token_ids: Any, prompt_ids: Any, messages: Any, tools: Any) -> Reply:
        thoughts, found, rest = text.rpartition("</think>")
        reasoning = thoughts.removeprefix("<think>") if found else None
        calls = [json.loads(body) for body in re.findall(r"<tool_call>(.*?)</tool_call>", rest)]
        content = re.sub(r"<tool_call>.*?</tool_call>", "", rest)
        made = tuple(
            ToolCall(call["name"], json.dumps(call["arguments"]), f"call_{n}") for n, call in enumerate(calls)
        )
        return Reply(content or None, reasoning, made)


def converse(
    agent: Callable[[Session], Awaitable[Any]],
    script: Callable[[str], str],
    *,
    limits: SessionLimits | None = None,
    prepare: Callable[[Scripted, Any], Any] | None = None,
    parser: ChatParser | None = None,
    **flags: Any,
) -> tuple[list[Sample], Scripted]:
    """Runs `agent` with a session, and returns the samples and the engine."""
    args = make_args(**{"rollout_max_response_len": 400, **flags})
    engine = Scripted(script)
    state = make_state(args, engine.tokenizer)
    state.engine = engine
    if prepare is not None:
        prepare(engine, state)

    async def run() -> list[Sample]:
        sample = Sample(prompt=[{"role": "user", "content": "go"}], index=7, session_id="rollout/7")
        async with open_session(args, sample, limits=limits, parser=parser or QwenParser()) as session:
            await agent(session)
        return session.samples()

    return state.run(run()), engine
