"""Tests the warnings of a run about session requests whose text the chat template spoils, and the part of the text
that it keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
from rollout_double import CHATML, make_tokenizer
from session_double import END, converse

from slime.sessions import Session
from slime.tracking.journal import read_events
from slime.tracking.run_record import recorded
from slime.tracking.samples import read_samples, write_samples

ADD: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
}


async def ask(session: Session, content: str, **fields: Any) -> None:
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        messages: Any = [{"role": "user", "content": content}]
        await client.chat.completions.create(model=session.model, messages=messages, **fields)


def with_template(template: str) -> Any:
    def prepare(engine: Any, state: Any) -> None:
        engine.tokenizer.chat_template = template

    return prepare


def test_tools_that_the_template_does_not_read_are_a_warning_once(tmp_path: Path) -> None:
    async def agent(session: Session) -> None:
        await ask(session, "hi", tools=[ADD])
        await ask(session, "ho", tools=[ADD])

    with recorded(tmp_path, rollouts=1):
        converse(agent, lambda _: "4" + END, prepare=with_template(CHATML))
    (text,) = [event["text"] for event in read_events(tmp_path, ("warning",))]
    assert text.startswith("a client of a session gave 1 tools, and the chat template does not read tools")


def test_a_template_that_reads_tools_and_a_client_without_are_no_warning(caplog: Any) -> None:
    async def tools(session: Session) -> None:
        await ask(session, "hi", tools=[ADD])

    async def none(session: Session) -> None:
        await ask(session, "hi")

    converse(tools, lambda _: "4" + END)
    converse(none, lambda _: "4" + END, prepare=with_template(CHATML))
    assert not caplog.messages


def test_a_message_that_has_the_template_already_is_a_warning(caplog: Any) -> None:
    """An agent that sends sample.prompt causes this with --apply-chat-template."""
    rendered = make_tokenizer(CHATML).apply_chat_template(
        [{"role": "user", "content": "12+34="}], add_generation_prompt=True, tokenize=False
    )

    async def agent(session: Session) -> None:
        await ask(session, rendered)

    converse(agent, lambda _: "4" + END)
    (said,) = caplog.messages
    assert said.startswith("a message of a session begins with '<|im_start|>', and so does the chat template")
    assert "leave --apply-chat-template off" in said


def test_a_kept_sample_shows_what_the_model_read(tmp_path: Path) -> None:
    async def agent(session: Session) -> None:
        await ask(session, "12+34= é", tools=[ADD])

    (sample,), engine = converse(agent, lambda _: "46" + END)
    write_samples(tmp_path, 0, [sample], range(1), lambda id_: "?", engine.tokenizer.decode)
    (found,) = read_samples(tmp_path, 0)
    assert found.prompt == [{"role": "user", "content": "go"}]  # the prompt of the data
    assert found.read == engine.calls[0][0] and found.read.endswith(
        "user\n12+34= é<|im_end|>\n<|im_start|>assistant\n"
    )
    assert json.dumps(ADD["function"]["name"]) in found.read
