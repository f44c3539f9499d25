"""Tests remote_rm with a real local HTTP server: replies, retries, the deadline, and errors without a retry."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from slime.rollout.rewards import async_rm, remote
from slime.types import Sample

Handler = Callable[[web.Request], Awaitable[web.Response]]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(remote, "_FIRST_PAUSE_S", 0.02)


def score(handler: Handler, *, deadline_s: float = 10.0, count: int = 1) -> list:
    async def scenario() -> list:
        app = web.Application()
        app.router.add_post("/rm", handler)
        async with TestServer(app) as server:
            args = SimpleNamespace(
                rm_type="remote_rm",
                rm_url=f"http://user:secret@{server.host}:{server.port}/rm?token=secret",
                rollout_deadline_s=deadline_s,
            )
            batch = [
                Sample(index=i, prompt="1+1=", response="2", label="2", metadata={"k": i})
                for i in range(count)
            ]
            return await asyncio.gather(*(async_rm(args, sample) for sample in batch))

    return asyncio.run(scenario())


def test_posts_the_sample_and_returns_the_reply():
    async def handler(request: web.Request) -> web.Response:
        body = await request.json()
        assert set(body) == {"prompt", "response", "label", "metadata"}
        right = float(body["response"] == body["label"])
        return web.json_response({"score": right, "k": body["metadata"]["k"], "prompt": body["prompt"]})

    assert score(handler, count=2) == [{"score": 1.0, "k": k, "prompt": "1+1="} for k in range(2)]


def test_retries_until_the_server_recovers():
    seen = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.path)
        if len(seen) == 1:
            return web.Response(status=503, text="warming up")
        if len(seen) == 2:
            request.transport.close()  # the connection breaks
        if len(seen) == 3:
            return web.Response(status=429)
        return web.json_response(0.25)

    assert score(handler) == [0.25]
    assert len(seen) == 4


def test_a_server_that_is_down_is_logged_at_once_and_once(caplog):
    with socket.socket() as held:  # bound and not listening: the kernel rejects connections
        held.bind(("127.0.0.1", 0))
        url = f"http://user:secret@127.0.0.1:{held.getsockname()[1]}/rm?token=secret"
        args = SimpleNamespace(rm_type="remote_rm", rm_url=url, rollout_deadline_s=0.5)

        async def scenario() -> list:
            samples = [Sample(index=i, prompt="", response="") for i in range(8)]
            return await asyncio.gather(*(async_rm(args, s) for s in samples), return_exceptions=True)

        assert all(isinstance(error, RuntimeError) for error in asyncio.run(scenario()))
    (line,) = (record.getMessage() for record in caplog.records if record.name == "slime.system.waiting")
    assert line.startswith(
        f"--rm-url http://127.0.0.1:{held_port(url)}/rm does not answer: ClientConnectorError"
    )
    assert line.endswith("sent again until --rollout-deadline-s 0.5") and "secret" not in line


def held_port(url: str) -> int:
    return int(url.rpartition(":")[2].partition("/")[0])


def test_a_server_that_recovers_was_logged(caplog):
    seen = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(1)
        return web.Response(status=503, text="loading") if len(seen) < 3 else web.json_response(1.0)

    assert score(handler) == [1.0]
    assert [
        r.getMessage().partition(": ")[2] for r in caplog.records if r.name == "slime.system.waiting"
    ] == ["HTTP 503: loading; requests to it are sent again until --rollout-deadline-s 10"]


def test_deadline_bounds_all_attempts():
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=500, text="broken model")

    start = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        score(handler, deadline_s=0.5)
    assert time.monotonic() - start < 10
    text = str(error.value)
    assert "reward remote_rm failed for sample 0" in text and "--rollout-deadline-s 0.5" in text
    assert "HTTP 500: broken model" in text and "secret" not in text
    assert isinstance(error.value.__cause__, TimeoutError)


def test_deadline_bounds_a_server_that_never_answers():
    async def handler(request: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.json_response(1.0)

    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"got no reward in 1 attempts; the last one ended in .*Timeout"):
        score(handler, deadline_s=0.3)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (web.Response(status=404, text="no such route"), "must answer 200, got 404: no such route"),
        (web.Response(text="<html>"), "must answer in JSON, got '<html>'"),
        (web.Response(text="null"), "a reward must be a number or a dict of numbers, got None"),
    ],
)
def test_answers_that_a_retry_cannot_mend(reply, message):
    seen = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(1)
        return reply

    with pytest.raises(ValueError, match="reward remote_rm failed for sample 0") as error:
        score(handler)
    assert message in str(error.value) and "secret" not in str(error.value)
    assert len(seen) == 1


def test_open_requests_are_bounded(monkeypatch):
    monkeypatch.setattr(remote, "_MAX_CONNECTIONS", 3)
    now, most = 0, 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await asyncio.sleep(0.02)
        now -= 1
        return web.json_response(1.0)

    assert score(handler, count=12) == [1.0] * 12
    assert most == 3


@pytest.mark.parametrize("url", [None, "", "localhost:80/rm", "ftp://host/rm"])
def test_url_must_be_http(url):
    args = SimpleNamespace(rm_type="remote_rm", rm_url=url, rollout_deadline_s=1.0)
    with pytest.raises(ValueError, match="--rm-url must be an http or https address"):
        asyncio.run(async_rm(args, Sample(index=0)))
