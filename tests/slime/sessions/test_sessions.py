"""Sessions fork, and end by limits, by bad requests, or by the rollout. Each end affects only the session's own
sample."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from session_double import CALL, END, converse

from slime.config.sections.sessions import SessionsConfig
from slime.data.agents.turn_rewards import turn_advantages
from slime.rollout.rewards.finite import figures as removed
from slime.sessions import Session, SessionLimits
from slime.types import Sample


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


async def ask(session: Session, messages: list[Any], **fields: Any) -> Any:
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        body = {"model": session.model, "messages": messages} | fields
        return await client.chat.completions.create(**body)


def repeat(prompt: str) -> str:
    """Returns the last word of the last message."""
    return prompt.rsplit(END, 1)[0].split()[-1] + END


def trained(sample: Sample, engine: Any) -> str:
    ids = sample.tokens[-sample.response_length :]
    return engine.tokenizer.decode([t for t, on in zip(ids, sample.loss_mask, strict=True) if on])


def test_a_rewritten_history_forks_and_no_token_is_trained_twice() -> None:
    async def agent(session: Session) -> None:
        begin = [user("say one"), said("one"), user("say two")]
        await ask(session, begin[:1])
        await ask(session, begin)
        await ask(session, [*begin, said("two"), user("say three")])
        await ask(session, [*begin, said("zwei"), user("say four")])  # the client changed the model's text
        await ask(session, [user("say five")])  # the client began again

    samples, engine = converse(agent, repeat)
    assert [trained(s, engine) for s in samples] == [
        "one<|im_end|>two<|im_end|>three<|im_end|>",
        "four<|im_end|>",
        "five<|im_end|>",
    ]
    first, second, third = (engine.tokenizer.decode(s.tokens) for s in samples)
    shared = first.index("say two")
    assert second[:shared] == first[:shared] and "zwei" in second and "say one" not in third
    assert [s.metadata.get("session", {}).get("samples") for s in samples] == [3, None, None]
    for sample in samples:
        sample.check()
    assert samples[1].prefix_cache_info.total_prompt_tokens == len(engine.prompts[3])


def test_clients_that_leave_out_thoughts_strip_and_rename_calls_do_not_fork() -> None:
    async def agent(session: Session) -> None:
        tools: Any = [{"type": "function", "function": {"name": "add"}}]
        first = await ask(session, [user("a")], tools=tools)
        assert first.choices[0].message.reasoning_content == "hm"
        call = {"id": "own", "type": "function", "function": {"name": "add", "arguments": '{"b":2,"a":1}'}}
        history = [user("a"), {"role": "assistant", "content": "so", "tool_calls": [call]}]
        result = {"role": "tool", "tool_call_id": "own", "content": [{"type": "text", "text": "3"}]}
        await ask(session, [*history, result], tools=tools)

    script = lambda p: f"done{END}" if "tool_response" in p else f"<think>hm</think>so \n{CALL}{END}"  # noqa: E731
    (sample,), engine = converse(agent, script)
    assert trained(sample, engine) == f"<think>hm</think>so \n{CALL}{END}done{END}"


def test_the_same_question_twice_gives_siblings_with_seeds_of_their_own() -> None:
    async def agent(session: Session) -> None:
        await asyncio.gather(*(ask(session, [user("say hi")]) for _ in range(3)))

    samples, engine = converse(agent, repeat)
    assert len(samples) == 3 and len({seed for _, _, seed in engine.calls}) == 3


def test_an_answer_that_was_cut_off_is_closed_without_training_on_that() -> None:
    async def agent(session: Session) -> None:
        first = await ask(session, [user("say abcdef")], max_tokens=3)
        assert first.choices[0].finish_reason == "length"
        stopped = await ask(session, [user("say abcdef"), said("abc"), user("say xyz")], stop=["y"])
        assert stopped.choices[0].message.content == "x"

    def script(prompt: str) -> str:
        return "xy" if "xyz" in prompt else repeat(prompt)

    (sample,), engine = converse(agent, script)
    assert trained(sample, engine) == "abcxy"
    assert engine.tokenizer.decode(sample.tokens).count(f"abc{END}\n<|im_start|>user") == 1
    assert engine.calls[1][1]["stop"] == ["y"]


LIMITS = {
    "turns": SessionLimits(turns=2),
    "tokens": SessionLimits(tokens=9),
    "tool_calls": SessionLimits(tool_calls=1),
    "time": SessionLimits(seconds=1.5),
}


@pytest.mark.parametrize("reason", [*LIMITS, "context"])
def test_an_agent_that_never_ends_is_ended(reason: str) -> None:
    """The agent gets an error, which it does not catch. Its tokens stay in the sample, which is truncated."""

    async def agent(session: Session) -> None:
        messages = [user("go")]
        tools: Any = [{"type": "function", "function": {"name": "add"}}]
        while True:
            answer = await ask(session, messages, tools=tools)
            messages += [answer.choices[0].message.model_dump(exclude_none=True), user("more")]
            await asyncio.sleep(0.05)

    text = f"{CALL}{END}" if reason == "tool_calls" else f"yes{END}"
    flags = {"rollout_max_context_len": 260} if reason == "context" else {}
    (sample,), engine = converse(agent, lambda _: text, limits=LIMITS.get(reason, SessionLimits()), **flags)
    assert sample.metadata["session"]["ended"] == reason, sample.metadata
    assert sample.status is Sample.Status.TRUNCATED
    sample.check()
    turns = sample.metadata["session"]["turns"]
    assert turns == {"turns": 2, "tokens": 3, "tool_calls": 2}.get(reason, turns) > 1
    if reason == "tokens":
        assert trained(sample, engine) == f"yes{END}yes{END}y"
    if reason == "context":
        assert len(sample.tokens) <= 260


def test_a_tool_that_hangs_ends_its_session_alone() -> None:
    """The session's time limit cancels the agent. The turn before stays, and a session that runs at the same time
    does too."""
    hung: list[bool] = []

    async def agent(session: Session) -> None:
        await ask(session, [user("say fine")])
        try:
            await asyncio.sleep(600)
        finally:
            hung.append(True)

    (sample,), engine = converse(agent, repeat, limits=SessionLimits(seconds=1.5))
    assert sample.metadata["session"]["ended"] == "time" and sample.status is Sample.Status.TRUNCATED
    assert hung == [True] and trained(sample, engine) == f"fine{END}"
    sample.check()


PICTURE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]
BAD: dict[str, dict[str, Any]] = {
    "media": {"messages": [{"role": "user", "content": PICTURE}]},
    "model": {"model": "gpt-5"},
    "request": {"n": 2},
    "template": {"messages": [{"role": "user", "content": "\x00bad"}]},
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_request_ends_its_sample_with_the_reason(reason: str) -> None:
    async def agent(session: Session) -> None:
        await ask(session, [user("say fine")])
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(
                session,
                BAD[reason].get("messages", [user("say no")]),
                **{k: v for k, v in BAD[reason].items() if k != "messages"},
            )
        assert caught.value.status_code in (400, 404) and caught.value.code == reason
        with pytest.raises(openai.PermissionDeniedError, match="the session has ended"):
            await ask(session, [user("say again")])

    def prepare(engine: Any, state: Any) -> None:
        own = state.tokenizer.chat_template
        refuse = "{% if messages[0].content.startswith('\x00') %}{{ raise_exception('no') }}{% endif %}"
        state.tokenizer.chat_template = refuse + own

    (sample,), engine = converse(agent, repeat, prepare=prepare)
    record = sample.metadata["session"]
    assert record["ended"] == reason and record["said"]
    assert sample.metadata["removed"] == {"reason": reason, "said": record["said"]}
    assert sample.status is Sample.Status.FAILED and sample.remove_sample
    assert trained(sample, engine) == f"fine{END}"
    sample.check()


def test_an_agent_that_says_nothing_gives_a_sample_that_is_not_trained_on() -> None:
    async def agent(session: Session) -> None: ...

    (sample,), _ = converse(agent, repeat)
    assert sample.remove_sample and sample.status is Sample.Status.FAILED and sample.loss_mask == [0]
    sample.check()
    record = sample.metadata["session"]
    assert record["ended"] == "no_request" and "must ask for an answer" in record["said"]
    assert sample.metadata["removed"] == {"reason": "no_request", "said": record["said"]}
    assert removed([sample]) == {"removed/no_request": 1.0}


def test_requests_with_another_key_are_counted_where_the_agent_makes_no_other() -> None:
    async def agent(session: Session) -> None:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key="EMPTY") as client:
            with pytest.raises(openai.AuthenticationError, match="give the client session.api_key"):
                await client.chat.completions.create(model="policy", messages=[user("x")])

    (sample,), _ = converse(agent, repeat)
    assert "got none, and 1 with another key; give its client" in sample.metadata["session"]["said"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_ends_its_sample(stream: bool) -> None:
    async def agent(session: Session) -> None:
        await ask(session, [user("say fine")])
        engines[0].gate = asyncio.Event()
        asking = asyncio.create_task(ask(session, [user("say no")], stream=stream))
        while len(engines[0].prompts) < 2:
            await asyncio.sleep(0.01)
        asking.cancel()
        while session.ended is None:
            await asyncio.sleep(0.01)

    engines: list[Any] = []
    (sample,), engine = converse(agent, repeat, prepare=lambda engine, _: engines.append(engine))
    assert sample.metadata["session"]["ended"] == "disconnected" and sample.remove_sample
    assert trained(sample, engine) == f"fine{END}"


def test_a_key_is_for_its_own_open_session() -> None:
    closed: list[tuple[str, str]] = []

    async def refused(session: Session, key: str, **headers: str) -> None:
        async with openai.AsyncOpenAI(
            base_url=session.base_url, api_key=key, default_headers=headers
        ) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(
                    model="policy", messages=[{"role": "user", "content": "x"}]
                )
        async with anthropic.AsyncAnthropic(base_url=session.url, api_key=key) as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(model="policy", max_tokens=9, messages=[user("x")])

    async def agent(session: Session) -> None:
        await refused(session, "wrong")
        await refused(session, session.api_key[:-1])
        closed.append((session.base_url, session.api_key))
        await ask(session, [user("say fine")])
        assert session.ended is None  # other sessions' requests do not end it

    async def reuse(session: Session) -> None:
        async with openai.AsyncOpenAI(base_url=closed[0][0], api_key=closed[0][1]) as client:
            with pytest.raises((openai.AuthenticationError, openai.APIConnectionError)):
                await client.with_options(max_retries=0).models.list()
        await refused(session, closed[0][1])
        await ask(session, [user("say mine")])

    for talk in (agent, reuse):
        (sample,), _ = converse(talk, repeat)
        assert sample.metadata["session"]["ended"] == "done" and not sample.remove_sample


def test_the_end_of_a_rollout_gives_the_sample_back_as_it_was_drawn() -> None:
    async def agent(session: Session) -> None:
        await ask(session, [user("say fine")])
        states[0].aborted = True
        await ask(session, [user("say no")])

    states: list[Any] = []
    (sample,), _ = converse(agent, repeat, prepare=lambda _, state: states.append(state))
    assert sample.status is Sample.Status.ABORTED and not sample.tokens and not sample.response_length


def test_an_aborted_sample_without_a_finite_reward_is_drawn_again() -> None:
    async def agent(session: Session) -> None:
        states[0].aborted = True
        try:
            await ask(session, [user("say no")])
        finally:
            made.extend(session.samples(float("nan")))

    states: list[Any] = []
    made: list[Sample] = []
    converse(agent, repeat, prepare=lambda _, state: states.append(state))
    (sample,) = made
    assert sample.status is Sample.Status.ABORTED and sample.metadata["session"]["ended"] == "aborted"


def test_errors_of_the_agent_and_of_the_engine_reach_the_run() -> None:
    async def faulty(session: Session) -> None:
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        converse(faulty, repeat)

    def broken(prompt: str) -> str:
        raise FloatingPointError("log-probs are nan")

    async def agent(session: Session) -> None:
        with pytest.raises(openai.PermissionDeniedError):
            await ask(session, [user("x")])

    with pytest.raises(FloatingPointError):
        converse(agent, broken)


def test_a_long_answer_keeps_the_stream_alive_and_a_late_refusal_is_an_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slime.sessions.server._COMMENT_EVERY_S", 0.02)
    found: list[str] = []

    async def agent(session: Session) -> None:
        engines[0].gate = asyncio.Event()
        body = {"model": "policy", "messages": [user("say hi")], "stream": True}
        headers = {"x-api-key": session.api_key}
        async with (
            aiohttp.ClientSession(headers=headers) as client,
            client.post(f"{session.base_url}/chat/completions", json=body) as answer,
        ):
            found.append((await answer.content.readline()).decode())
            session.end("time", "over")
            found.append((await answer.text()).strip())

    engines: list[Any] = []
    converse(agent, repeat, prepare=lambda engine, _: engines.append(engine))
    assert found[0].startswith(":")
    last = found[1].splitlines()[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "time"


def test_flags_are_the_limits() -> None:
    assert SessionLimits.of(SessionsConfig()) == SessionLimits(100, None, None, 3600.0)


def test_rewards_of_turns_go_to_the_sample_that_trains_on_them() -> None:
    async def agent(session: Session) -> None:
        begin = [user("say one"), said("one"), user("say two")]
        await ask(session, begin[:1])
        session.reward(0.5)
        await ask(session, begin)
        await ask(session, [*begin[:2], user("say three")])
        session.reward(2)

    samples, _ = converse(agent, repeat)
    assert [s.metadata.get("turn_rewards") for s in samples] == [[0.5, 0.0], [2.0]]
    assert [len(turns) for turns in turn_advantages(samples)] == [s.response_length for s in samples]


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 0.5])
def test_a_reward_that_is_not_finite_ends_its_sample_alone(reward: float) -> None:
    async def agent(session: Session) -> None:
        await ask(session, [user("say fine")])
        made.extend(session.samples(reward))

    made: list[Sample] = []
    converse(agent, repeat)
    (sample,) = made
    good = reward == 0.5
    assert sample.metadata["session"]["ended"] == ("done" if good else "reward")
    assert sample.reward == (0.5 if good else 0.0) and sample.remove_sample is not good
