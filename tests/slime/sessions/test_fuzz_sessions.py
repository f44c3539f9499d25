"""Generated and changed requests of strangers are answered or rejected, without an error of the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import pytest
from hypothesis import strategies as st
from rollout_double import make_args, make_state
from session_double import CALL, END, QwenParser, Scripted
from test_malformed_requests import BODIES, places

from slime.sessions import Session, open_session
from slime.sessions.limits import DONE, NO_REQUEST
from slime.types import Sample

ANSWERED = {200, 400, 403, 404, 405, 413}
"""Statuses 4xx, after which no client repeats the request."""
REASONS = {
    DONE,
    NO_REQUEST,
    "request",
    "media",
    "model",
    "template",
    "parser",
    "tools",
    "length",
    "context",
    "no answer",
}
HALVES = st.sampled_from(["\ud83d", "\udc00", "\udc80", "\x00", "\u2028", "<|im_end|>", "\ufeff", "\r\n"])
TEXTS = st.text(st.characters(), max_size=6) | HALVES | st.builds("{}{}".format, st.text(max_size=3), HALVES)
NUMBERS = st.integers(-(2**70), 2**70) | st.floats() | st.sampled_from([0, -1, 1, 2**63, 10**400])
LEAVES = st.none() | st.booleans() | NUMBERS | TEXTS
NAMES = (
    st.sampled_from(
        [
            "type",
            "text",
            "role",
            "content",
            "id",
            "name",
            "input",
            "arguments",
            "function",
            "tool_calls",
            "image_url",
        ]
    )
    | TEXTS
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
DEEP = st.builds(
    lambda levels, text: json.loads(f"{text[0] * levels}1{text[1] * levels}"),
    st.integers(1, 300),
    st.just("[]"),
)
PATHS = sorted(BODIES)
FRAGMENTS = st.sampled_from(
    [
        END,
        CALL,
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "{",
        "}",
        "[" * 50,
        '"',
        '{"name": ',
        "\ufffd",
    ]
)
SAID = st.lists(FRAGMENTS | st.text(max_size=4), max_size=6).map(lambda parts: "".join(parts) + END)


@st.composite
def changed(draw: st.DrawFn) -> tuple[str, bytes]:
    """Draws a dialect's correct request with up to three fields changed, added, removed or repeated."""
    path = draw(st.sampled_from(PATHS))
    body: Any = json.loads(json.dumps(BODIES[path]))
    for _ in range(draw(st.integers(0, 3))):
        spots = list(places(body))
        if not spots:
            break
        *above, last = draw(st.sampled_from(spots))
        target = body
        for name in above:
            target = target[name]
        match draw(st.sampled_from(["change", "take out", "add", "repeat"])):
            case "change":
                target[last] = draw(VALUES | DEEP)
            case "take out":
                del target[last]
            case "add" if isinstance(target, dict):
                target[draw(NAMES)] = draw(VALUES)
            case _ if isinstance(target, list):
                target.append(target[last])
    return path, json.dumps(body).encode()


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, bytes]:
    """Draws a request whose bytes are cut, changed or repeated."""
    path, body = draw(changed())
    at, size, new = draw(st.integers(0, len(body))), draw(st.integers(0, 30)), draw(st.binary(max_size=6))
    return path, body[:at] + new + body[at + size :]


REQUESTS = (
    changed()
    | damaged()
    | st.tuples(
        st.sampled_from(PATHS), VALUES.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=60)
    )
)


class Served:
    """Sessions of a run. Each request has its own session."""

    def __init__(self) -> None:
        self.args = make_args(rollout_max_response_len=60)
        self.engine = Scripted(lambda _: self.said)
        self.said, self.number = f"ok{END}", 0
        self.state = make_state(self.args, self.engine.tokenizer)
        self.state.engine = self.engine

    def call(self, work: Callable[[Session], Any]) -> Sample:
        """Returns the first sample of a session after `work`."""

        async def run() -> Sample:
            self.number += 1
            sample = Sample(prompt="go", index=self.number, session_id=f"rollout/{self.number}")
            async with open_session(self.args, sample, parser=QwenParser()) as session:
                await asyncio.wait_for(work(session), 20)
            made = session.samples()
            for one in made:
                one.check()
            return made[0]

        return self.state.run(run())


@pytest.fixture
def served() -> Iterator[Served]:
    yield Served()


def test_any_request_is_answered_or_refused(fuzz: Callable[..., None], served: Served) -> None:
    def check(case: tuple[tuple[str, bytes], str, str]) -> None:
        (path, body), served.said, counts = case
        path += counts if path == "messages" else ""

        async def work(session: Session) -> None:
            headers = {"Authorization": f"Bearer {session.api_key}", "Content-Type": "application/json"}
            async with (
                aiohttp.ClientSession() as client,
                client.post(f"{session.base_url}/{path}", data=body, headers=headers) as answer,
            ):
                text = (await answer.read()).decode()
            assert answer.status in ANSWERED, (answer.status, text)
            if answer.content_type == "text/event-stream":
                for line in text.split("\n"):
                    if line.startswith("data: ") and line != "data: [DONE]":
                        json.loads(line.removeprefix("data: "))
            else:
                said = json.loads(text)
                assert answer.status == 200 or said["error"]["message"]

        ended = served.call(work).metadata["session"]["ended"]
        assert ended in REASONS, ended

    fuzz(check, st.tuples(REQUESTS, SAID | st.just(f"ok{END}"), st.sampled_from(["", "", "/count_tokens"])))


HEAD = (
    b"POST /sessions/x/v1/messages HTTP/1.1\r\nHost: a\r\n"
    b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
)
PIECES = st.sampled_from(
    [
        *(
            b"\r\n",
            b"\n",
            b"\r",
            b": ",
            b"\x00",
            b"\xff",
            b"Transfer-Encoding: chunked\r\n",
            b"ffffffffff\r\n",
            b"0\r\n\r\n",
        ),
        *(
            b"Content-Length: -1\r\n",
            b"Content-Length: 99999999999999999999\r\n",
            b"Content-Length: 2\r\n",
            b"Expect: 100-continue\r\n",
        ),
        *(
            b"Content-Encoding: gzip\r\n",
            b"Upgrade: h2c\r\nConnection: Upgrade\r\n",
            b"A: " + b"a" * 9000 + b"\r\n",
            b"PRI * HTTP/2.0\r\n",
        ),
        *(
            b"GET http://[::1 HTTP/1.1\r\n",
            b"GET /sessions/%ff/v1/models HTTP/1.1\r\n",
            b"x-api-key: \xff\r\n",
            b"HTTP/9.9",
        ),
    ]
)


def test_any_frame_of_http_leaves_the_server_as_it_is(fuzz: Callable[..., None], served: Served) -> None:
    """The bytes are not, or not quite, HTTP. They are rejected or the connection ends, and the next request is
    answered."""

    def check(case: list[tuple[int, int, bytes]]) -> None:
        frame = HEAD
        for at, size, new in case:
            place = at % (len(frame) + 1)
            frame = frame[:place] + new + frame[place + size :]

        async def work(session: Session) -> None:
            host, port = session.base_url.split("/")[2].split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(frame)
            writer.write_eof()
            head = (await asyncio.wait_for(reader.read(), 10))[:12]
            writer.close()
            assert not head or (head.startswith(b"HTTP/1.") and head[9:10] in b"1245"), head
            assert head[9:10] != b"5" or head[9:12] in (b"501", b"505"), head
            headers = {"Authorization": f"Bearer {session.api_key}"}
            async with (
                aiohttp.ClientSession() as client,
                client.get(f"{session.base_url}/models", headers=headers) as answer,
            ):
                assert answer.status == 200

        served.call(work)

    change = st.tuples(st.integers(0, 10**4), st.integers(0, 20), PIECES | st.binary(max_size=6))
    fuzz(check, st.lists(change, min_size=1, max_size=4))
