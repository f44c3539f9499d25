"""Tests sessions of agents on a real engine, for every backend. test_backend_conformance.py has the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from engine_fixtures import Stack, answered, hf_log_probs, server_of
from rollout_double import make_args
from transformers import AutoTokenizer

from slime.config import Config
from slime.protocols import RolloutEngine
from slime.rollout.state import GenerateState
from slime.sessions import Session, open_session
from slime.types import Sample
from vime.pool.router import RouterSpec
from vime.vllm.pool import VllmEnginePool

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)
TURNS = 3
QUESTION = "what is 12 + 34 and why is it not 13 + 34, " * 5
"""A text that is longer than a block of the prefix cache, which has 128 tokens on CPUs."""


async def chat(session: Session) -> None:
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        for _ in range(TURNS):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            messages += [answer.choices[0].message.model_dump(exclude_none=True)]
            messages.append({"role": "user", "content": "and 5 more"})


async def responses(session: Session) -> None:
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        asked: dict[str, Any] = {"input": QUESTION}
        for _ in range(TURNS):
            # The client's own helper raises an error for an incomplete response.
            stream = await client.responses.create(model="policy", stream=True, **asked)
            last: Any = [event async for event in stream][-1]
            assert last.type in ("response.completed", "response.incomplete")
            asked = {"input": "and 5 more", "previous_response_id": last.response.id}


async def messages(session: Session) -> None:
    async with anthropic.AsyncAnthropic(base_url=session.url, api_key=session.api_key) as client:
        said: list[Any] = [{"role": "user", "content": QUESTION}]
        for _ in range(TURNS):
            async with client.messages.stream(model="policy", max_tokens=16, messages=said) as events:
                answer = await events.get_final_message()
            blocks = [block.model_dump() for block in answer.content]
            said += [{"role": "assistant", "content": blocks}, {"role": "user", "content": "and 5 more"}]


def converse(
    engine: RolloutEngine,
    checkpoint: Path,
    agents: list[Callable[[Session], Awaitable[None]]],
    **sampling: Any,
) -> list[Sample]:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, chat_template=TEMPLATE)
    args = make_args(rollout_max_response_len=16, rollout_deadline_s=90.0)
    state = GenerateState(Config.from_args(args), engine, tokenizer, hook_args=args).enter()

    async def one(index: int, agent: Callable[[Session], Awaitable[None]]) -> Sample:
        sample = Sample(prompt="", index=index, session_id=f"rollout/{index}")
        async with open_session(args, sample, state.sampling_params | sampling) as session:
            await agent(session)
        (made,) = session.samples()
        return made

    async def run() -> list[Sample]:
        return await asyncio.gather(*(one(i, agent) for i, agent in enumerate(agents)))

    try:
        return state.run(run())
    finally:
        state.close()


def check(sample: Sample, checkpoint: Path, version: int) -> None:
    sample.check()
    assert sample.metadata["session"]["ended"] == "done" and sample.metadata["session"]["turns"] == TURNS
    assert set(sample.weight_versions) == {version}
    start = len(sample.tokens) - sample.response_length
    expected = hf_log_probs(checkpoint, sample.tokens[:start], sample.tokens[start:], 1.0)
    trained = [i for i, on in enumerate(sample.loss_mask or []) if on]
    assert len(trained) >= TURNS and sample.rollout_log_probs is not None
    assert [sample.rollout_log_probs[i] for i in trained] == pytest.approx(
        expected[trained].tolist(), abs=1e-4
    )
    assert sample.prefix_cache_info.prefix_cache_hit_rate > 0.2


def test_clients_of_all_dialects_make_samples(served: Any) -> None:
    """The samples have the model's log-probs, for its own tokens only."""
    checkpoint = served.stack.checkpoint
    for sample in converse(served.pool.client(), checkpoint, [chat, responses, messages]):
        check(sample, checkpoint, served.stack.version)


def test_an_agent_that_reaches_the_engines_context_is_truncated_and_trained(served: Any) -> None:
    """The engine cuts the last answer to the room that is left in its context."""

    async def endless(session: Session) -> None:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            said: list[Any] = [{"role": "user", "content": QUESTION}]
            while True:
                answer = await client.chat.completions.create(model="policy", messages=said)
                said += [answer.choices[0].message.model_dump(exclude_none=True)]
                said.append({"role": "user", "content": "and 5 more"})

    params = {"ignore_eos": True, "max_new_tokens": 120}
    (sample,) = converse(served.pool.client(), served.stack.checkpoint, [endless], **params)
    record = sample.metadata["session"]
    assert record["ended"] == "context" and "the context length is 512 tokens" in record["said"]
    assert sample.status is Sample.Status.TRUNCATED and not sample.remove_sample and record["turns"] > 1
    assert len(sample.tokens) == 512 and sum(sample.loss_mask or []) > 100
    sample.check()


def test_a_stream_shows_the_answer_early_and_its_end_ends_the_request(served: Any) -> None:
    """The tokens are the same with and without a stream. If a client disconnects in the middle, the engine stops its
    request."""
    streams = served.pool.client().streams
    pieces: list[int] = []

    async def streamed(session: Session, stop_after: int = 0) -> None:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            said: Any = [{"role": "user", "content": QUESTION}]
            count = 0
            async for chunk in await client.chat.completions.create(
                model="policy", messages=said, stream=True
            ):
                count += bool(chunk.choices[0].delta.content)
                if count == stop_after > 0:
                    return
            pieces.append(count)

    async def whole(session: Session) -> None:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": QUESTION}]
            )

    async def gone(session: Session) -> None:
        await streamed(session, stop_after=1)
        while session.ended is None:
            await asyncio.sleep(0.02)

    checkpoint, params = served.stack.checkpoint, {"ignore_eos": True, "max_new_tokens": 200}
    (one,), (other,) = (
        converse(served.pool.client(), checkpoint, [agent], **params) for agent in (streamed, whole)
    )
    assert (one.tokens, one.rollout_log_probs) == (other.tokens, other.rollout_log_probs)
    assert one.response_length == 200 and (pieces[0] > 5 if streams else pieces == [1])
    if streams:
        before = served.stack.metric("generation_tokens_total")
        (left,) = converse(served.pool.client(), checkpoint, [gone], **params | {"max_new_tokens": 250})
        assert left.metadata["session"]["ended"] == "disconnected" and left.remove_sample
        while served.stack.metric("num_requests_running"):
            time.sleep(0.02)
        assert served.stack.metric("generation_tokens_total") < before + 250


@pytest.mark.slow
def test_a_session_survives_its_engine(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    stack.pool.start()
    stack.push(stack.checkpoint)

    async def agent(session: Session) -> None:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            said: list[Any] = [{"role": "user", "content": QUESTION}]
            for turn in range(TURNS):
                if turn == 1:
                    await asyncio.to_thread(server_of(stack.pool.engine_urls[0]).kill)
                answer = await client.chat.completions.create(model="policy", messages=said)
                said += [answer.choices[0].message.model_dump(exclude_none=True)]
                said.append({"role": "user", "content": "and 5 more"})

    try:
        (sample,) = converse(stack.pool.client(), stack.checkpoint, [agent])
    finally:
        stack.pool.stop()
    sample.prefix_cache_info.cached_tokens += 10**6  # the new engine's cache was empty
    check(sample, stack.checkpoint, stack.version)


class Talk:
    """A session whose turns the test starts one by one."""

    def __init__(self, session: Session, number: int) -> None:
        self.session, self.number = session, number
        self.said: list[Any] = []

    async def turn(self, alive: list[str]) -> str:
        """Runs one turn and returns the engine of `alive` that answered, according to the engines' own counts."""
        before = await asyncio.to_thread(counts, alive)
        text = "and 5 more" if self.said else f"{self.number} * {self.number}, {QUESTION}"
        self.said.append({"role": "user", "content": text})
        async with openai.AsyncOpenAI(base_url=self.session.base_url, api_key=self.session.api_key) as client:
            answer = await client.chat.completions.create(model="policy", messages=self.said)
        self.said.append(answer.choices[0].message.model_dump(exclude_none=True))
        after = await asyncio.to_thread(counts, alive)
        (found,) = [url for url in alive if after[url] > before[url]]
        assert after[found] == before[found] + 1
        return found


def counts(urls: list[str]) -> dict[str, float]:
    return {url: answered(url, Stack.key) for url in urls}


def two_engines(root: Path) -> Stack:
    """Starts a stack with two engines behind a router that keeps each session at its engine."""
    stack = Stack(root)
    first = stack.pool._members[0].spec
    other = replace(first, index=1, log_path=str(root / "other.log"))
    argv = ("--policy", "consistent_hash")
    router = RouterSpec(run_key=Stack.key, log_path=str(root / "router.log"), argv=argv)
    stack.pool.stop()
    stack.pool = VllmEnginePool([first, other], router, source=stack, health_check_interval_s=5)
    stack.pool.start()
    return stack


@pytest.mark.slow
def test_a_session_keeps_its_engine_of_two_until_that_dies(tmp_path: Path) -> None:
    """The numbers of cached tokens prove it, because each session begins with other words."""
    stack = two_engines(tmp_path)
    here, there = stack.pool.engine_urls
    homes: list[str] = []

    async def run(args: Any) -> list[Sample]:
        async with AsyncExitStack() as entered:
            opened = [open_session(args, Sample(prompt="", index=i)) for i in range(12)]
            talks = [Talk(await entered.enter_async_context(one), i) for i, one in enumerate(opened)]
            homes.extend([await talk.turn([here, there]) for talk in talks])
            assert [await talk.turn([here, there]) for talk in talks] == homes
            await asyncio.to_thread(server_of(there).kill)
            assert {await talk.turn([here]) for talk in talks} == {here}
            assert stack.pool.engine_urls == [here], "the other engine is not back yet"
        return [sample for talk in talks for sample in talk.session.samples()]

    tokenizer = AutoTokenizer.from_pretrained(stack.checkpoint, chat_template=TEMPLATE)
    args = make_args(rollout_max_response_len=16, rollout_deadline_s=90.0)
    state = GenerateState(Config.from_args(args), stack.pool.client(), tokenizer, hook_args=args).enter()
    try:
        stack.push(stack.checkpoint)
        made = state.run(run(args))
    finally:
        state.close()
        stack.pool.stop()
    assert set(homes) == {here, there}, "twelve sessions, so both engines had some"
    rates: dict[str, list[float]] = {here: [], there: []}
    for sample, home in zip(made, homes, strict=True):
        rates[home].append(sample.prefix_cache_info.prefix_cache_hit_rate)
        if home == there:
            sample.prefix_cache_info.cached_tokens += 10**6  # the last turn began with an empty cache
        check(sample, stack.checkpoint, stack.version)
    print(f"hit rates: {rates[here]}, and with the last turn elsewhere {rates[there]}")
    assert min(rates[here]) > max(rates[there]) > 0.1
