"""The length of messages is checked before costly work, the event loop runs meanwhile, and the context ends a session
as a limit does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import openai
import pytest
from session_double import END, Scripted, converse

from slime.sessions import Session
from slime.sessions.rendering import ChatRenderer
from slime.types import Sample


def engine_with(context: int) -> Callable[[Scripted, Any], None]:
    async def context_tokens(deadline_s: float) -> int:
        await asyncio.sleep(0)
        return context

    def prepare(engine: Any, state: Any) -> None:
        engine.context_tokens = context_tokens

    return prepare


@pytest.mark.parametrize("which", ["engine", "flag", "both"])
def test_an_agent_that_reaches_the_context_is_truncated_and_trained(which: str) -> None:
    """The limit is the engine's length or --rollout-max-context-len. The last answer is cut to the room that
    is left."""

    async def agent(session: Session) -> None:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            said: list[Any] = [{"role": "user", "content": "q"}]
            while True:
                answer = await client.chat.completions.create(model="policy", messages=said, max_tokens=30)
                said += [answer.choices[0].message.model_dump(exclude_none=True)]
                said += [{"role": "user", "content": "x" * 20}]

    flags = {} if which == "engine" else {"rollout_max_context_len": 200}
    prepare = engine_with(10_000 if which == "flag" else 200)
    (sample,), engine = converse(agent, lambda _: "y" * 20 + END, prepare=prepare, **flags)
    record = sample.metadata["session"]
    assert record["ended"] == "context" and "the context length is 200 tokens" in record["said"]
    assert sample.status is Sample.Status.TRUNCATED and not sample.remove_sample
    assert 160 < len(sample.tokens) <= 200 and sum(sample.loss_mask or []) > 3
    assert all(
        len(prompt) + params["max_new_tokens"] <= 200
        for prompt, (_, params, _) in zip(engine.prompts, engine.calls, strict=True)
    )
    sample.check()


def test_what_an_engine_refuses_for_another_reason_is_not_the_context() -> None:
    """The words of the engine's error do not matter."""

    def refuse(prompt: str) -> str:
        raise ValueError("logit_bias must not be longer than the context length")

    async def agent(session: Session) -> None:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "q"}])

    (sample,), _ = converse(agent, refuse)
    assert sample.metadata["session"]["ended"] == "engine" and sample.remove_sample


def body_of(path: str, text: str) -> dict[str, Any]:
    if path == "responses":
        return {"model": "policy", "input": text}
    return {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize("place", ["content", "tools", "many"])
@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages", "messages/count_tokens"])
def test_four_megabytes_are_refused_by_a_look_at_a_part(
    path: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenised: list[int] = []
    ids = ChatRenderer._ids
    monkeypatch.setattr(
        ChatRenderer, "_ids", lambda self, text: tokenised.append(len(text)) or ids(self, text)
    )
    body = body_of(path, "words of a log " * 280_000 if place == "content" else "hi")
    schema = {"type": "object", "description": "words of a log " * 280_000}
    if place == "tools":
        key = "input_schema" if path.startswith("messages") else "parameters"
        tool: dict[str, Any] = {"name": "add", key: schema}
        tool = {"type": "function", "function": tool} if path.startswith("chat") else tool
        body["tools"] = [{"type": "function", **tool}]
    if place == "many":
        name = "input" if path == "responses" else "messages"
        body[name] = [{"role": "user", "content": "hi"}] * 5_000
    found: list[Any] = []

    async def agent(session: Session) -> None:
        headers = {"x-api-key": session.api_key}
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{session.base_url}/{path}", data=json.dumps(body), headers=headers) as answer,
        ):
            found.extend([answer.status, await answer.text()])

    (sample,), _ = converse(agent, lambda _: f"ok{END}", prepare=engine_with(4_096))
    assert found[0] == 400 and "context length is 4096 tokens" in found[1]
    assert sum(tokenised) <= 2 * 4_096 + (1 << 15)
    ended = sample.metadata["session"]["ended"]
    assert ended == ("no_request" if path.endswith("count_tokens") else "context")


def test_a_long_request_leaves_the_event_loop_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request fits the context: other tasks run while its text is tokenised."""
    beats: list[str] = []
    doing = ["nothing"]

    async def beat() -> None:
        while True:
            beats.append(doing[-1])
            await asyncio.sleep(0.002)

    async def agent(session: Session) -> None:
        body = json.dumps(body_of("messages", "words of a log " * 20_000))
        beating = asyncio.create_task(beat())
        async with (
            aiohttp.ClientSession(headers={"x-api-key": session.api_key}) as client,
            client.post(f"{session.base_url}/messages", data=body) as answer,
        ):
            assert answer.status == 200, await answer.text()
        beating.cancel()

    def tokenise(self: ChatRenderer, text: str) -> list[int]:
        doing.append("tokenising")
        try:
            return ids(self, text)
        finally:
            doing.append("nothing")

    ids = ChatRenderer._ids
    monkeypatch.setattr(ChatRenderer, "_ids", tokenise)
    (sample,), _ = converse(agent, lambda _: f"ok{END}", prepare=engine_with(400_000))
    assert len(sample.tokens) > 300_000 and beats.count("tokenising") > 5
