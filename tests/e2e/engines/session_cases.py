"""Sessions of agents over a real engine, for every backend: test_backend_conformance.py has the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from engine_fixtures import Stack, hf_log_probs, server_of
from rollout_double import make_args
from transformers import AutoTokenizer

from slime.protocols import RolloutEngine
from slime.rollout.state import GenerateState
from slime.sessions import Session, open_session
from slime.types import Sample

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)
TURNS = 3
QUESTION = "what is 12 + 34 and why is it not 13 + 34, " * 5
"""Longer than a block of the cache of prefixes, which has 128 tokens on CPUs."""


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
            # the client's own helper raises an error for a response that is incomplete
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
    engine: RolloutEngine, checkpoint: Path, agents: list[Callable[[Session], Awaitable[None]]]
) -> list[Sample]:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, chat_template=TEMPLATE)
    args = make_args(rollout_max_response_len=16, rollout_deadline_s=90.0)
    args.rollout_state = state = GenerateState(args, engine, tokenizer)

    async def one(index: int, agent: Callable[[Session], Awaitable[None]]) -> Sample:
        sample = Sample(prompt="", index=index, session_id=f"rollout/{index}")
        async with open_session(args, sample) as session:
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
    """The log-probs that the model has, over its tokens alone."""
    checkpoint = served.stack.checkpoint
    for sample in converse(served.pool.client(), checkpoint, [chat, responses, messages]):
        check(sample, checkpoint, served.stack.version)


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
