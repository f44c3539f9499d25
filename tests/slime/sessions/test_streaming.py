"""Tests answers that a client receives while they are written: the same texts, tokens and samples as without a
stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest
from rollout_double import make_tokenizer
from session_double import END, Scripted, converse

from slime.sessions import Session
from slime.sessions.live import TextSoFar
from slime.sessions.messages import PlainParser
from slime.types import Sample

SAID = "größe 😀 done"
Texts = Callable[[Session], AsyncIterator[str]]


def plain(agent: Callable[[Session], Awaitable[Any]], **more: Any) -> tuple[list[Sample], Scripted]:
    """Returns the samples of a session with a streaming engine, whose answers are text only."""
    own = more.pop("prepare", lambda engine: None)

    def prepare(engine: Scripted, _: Any) -> None:
        engine.streams = True
        own(engine)

    return converse(agent, lambda _: SAID + END, prepare=prepare, parser=PlainParser(), **more)


async def chat(session: Session) -> AsyncIterator[str]:
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        said: Any = [{"role": "user", "content": "go"}]
        asked: Any = {"stream": True, "stream_options": {"include_usage": True}}
        last = None
        async for chunk in await client.chat.completions.create(model="policy", messages=said, **asked):
            if chunk.choices and chunk.choices[0].delta.content:
                yield chunk.choices[0].delta.content
            last = chunk
        assert last is not None and last.usage.completion_tokens == len((SAID + END).encode()) - len(END) + 1


async def responses(session: Session) -> AsyncIterator[str]:
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        numbers = []
        async with client.responses.stream(model="policy", input="go") as events:
            async for event in events:
                numbers.append(event.sequence_number)
                if event.type == "response.output_text.delta":
                    yield event.delta
            whole = await events.get_final_response()
        assert whole.output_text == SAID and numbers == list(range(len(numbers)))


async def messages(session: Session) -> AsyncIterator[str]:
    async with anthropic.AsyncAnthropic(base_url=session.url, api_key=session.api_key) as client:
        said: Any = [{"role": "user", "content": "go"}]
        async with client.messages.stream(model="policy", max_tokens=99, messages=said) as events:
            async for text in events.text_stream:
                yield text
            whole = await events.get_final_message()
        assert whole.content[0].text == SAID and len(whole.content) == 1 and whole.usage.output_tokens > 9


@pytest.mark.parametrize("talk", [chat, responses, messages])
def test_a_client_sees_text_before_the_answer_is_whole(talk: Texts) -> None:
    """The engine waits for the client after the letter ö."""
    seen: list[str] = []
    waited: list[str] = []

    async def agent(session: Session) -> None:
        async for text in talk(session):
            seen.append(text)
            if "ö" in text:
                gate.set()

    async def shown(place: int) -> None:
        if place == 4:
            await asyncio.wait_for(gate.wait(), 30)
            waited.append("".join(seen))

    gate = asyncio.Event()

    def prepare(engine: Scripted) -> None:
        engine.shown = shown

    (sample,), engine = plain(agent, prepare=prepare)
    assert waited == ["grö"] and "".join(seen) == SAID and len(seen) > 1
    (whole,), other = converse(
        lambda session: drain(talk, session), lambda _: SAID + END, parser=PlainParser()
    )
    assert other.calls == engine.calls
    assert (sample.tokens, sample.loss_mask) == (whole.tokens, whole.loss_mask)
    assert sample.rollout_log_probs == whole.rollout_log_probs
    sample.check()


async def drain(talk: Texts, session: Session) -> None:
    assert "".join([text async for text in talk(session)]) == SAID


def test_a_client_that_disconnects_in_a_stream_ends_request_and_sample() -> None:
    cancelled: list[int] = []

    async def shown(place: int) -> None:
        if place == 4:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(place)
                raise

    def prepare(engine: Scripted) -> None:
        engine.shown = shown

    async def agent(session: Session) -> None:
        stream = chat(session)
        assert await anext(stream) == "grö"
        await stream.aclose()
        while session.ended is None:
            await asyncio.sleep(0.01)

    (sample,), _ = plain(agent, prepare=prepare)
    assert cancelled == [4]
    assert sample.metadata["session"]["ended"] == "disconnected" and sample.remove_sample


@pytest.mark.parametrize("same", [True, False])
def test_an_engine_that_takes_over_must_write_what_the_client_saw(same: bool) -> None:
    class Dying(Scripted):
        """An engine that loses its first attempt in the middle."""

        async def generate(self, token_ids: list[int], params: Any, **fields: Any) -> Any:
            show = fields["on_tokens"]
            lost = self.tokenizer.encode(SAID[:4] if same else "gras", add_special_tokens=False)
            show(0, lost, [-1.0] * len(lost))
            await asyncio.sleep(0.1)
            return await super().generate(token_ids, params, **fields)

    def prepare(engine: Scripted) -> None:
        engine.__class__ = Dying

    async def agent(session: Session) -> None:
        if same:
            await drain(chat, session)
            return
        with pytest.raises(openai.APIError, match="in the middle of an answer"):
            await drain(chat, session)

    (sample,), _ = plain(agent, prepare=prepare)
    assert sample.status is (Sample.Status.COMPLETED if same else Sample.Status.ABORTED)


def test_text_so_far_holds_back_what_may_change() -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("aé<|im_end|>b stop", add_special_tokens=False)
    special = {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    text = TextSoFar(tokenizer, special)
    assert [text.add([number]) for number in ids] == ["a", "", "é", "", "<|im_end|>b", *" stop"]
    held = TextSoFar(tokenizer, special, hold=4)
    assert "".join(held.add([number]) for number in ids) == "aé<|im_end|>b "
