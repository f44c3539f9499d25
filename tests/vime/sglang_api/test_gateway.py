"""Tests the gateway and the real vllm-router in front of servers that report their requests. Engines: gateway_cases
of e2e."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from vime.pool.asgi import LARGEST_BODY_BYTES
from vime.pool.control import ADAPTER_HEADER
from vime.pool.router import RouterSpec
from vime.sglang_api.gateway import with_model, wrap
from vime.sglang_api.request import WRAPPED
from vime.vllm.router import VllmRouter

KEY = "secret"
HEADERS = {"Authorization": f"Bearer {KEY}"}
JSON = {"Content-Type": "application/json"}
DEEP = b"[" * 200_000 + b"]" * 200_000


def test_a_body_travels_whole_with_what_the_router_must_know() -> None:
    body = b'{"input_ids":[3,4],"stream":true,"image_data":["x"],"odd":1e-3}'
    wrapped = json.loads(wrap(body))
    assert wrapped == {"token_ids": [3, 4], "sampling_params": {}, "stream": True, WRAPPED: json.loads(body)}
    for other in (b'{"text":"a"}', b'{"input_ids":[[1],[2]]}', b'{"input_ids":"x"}'):
        wrapped = json.loads(wrap(other))
        assert (wrapped["token_ids"], wrapped["stream"], wrapped[WRAPPED]) == ([0], False, json.loads(other))


def test_requests_that_name_no_adapter_get_that_of_the_run() -> None:
    assert json.loads(wrap(b'{"text":"a"}', "maths"))["vime_adapter"] == "maths"
    for model, expected in (({}, "maths"), ({"model": "policy"}, "maths"), ({"model": "code"}, "code")):
        body = json.dumps({**model, "prompt": "a", "n": 2}).encode()
        assert json.loads(with_model(body, "maths")) == {"prompt": "a", "n": 2, "model": expected}
    named = b'{"model": "/models/m", "prompt": "a"}'
    for adapter, expected in (("", "policy"), ("maths", "maths")):
        assert json.loads(with_model(named, adapter, "/models/m"))["model"] == expected
        assert with_model(named, adapter, "/models/other") == named
    assert with_model(b'{"prompt": "a"}', "", "/models/m") == b'{"prompt": "a"}'
    for other in (b"{", b"[1]", b'{"model": 3}', b"", b'{"model": "\xff"}', b'{"prompt": %b}' % DEEP):
        assert with_model(other, "maths") == other


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b'{"stream":3}', b'{"text":"a","stream":"x"}', DEEP),
        *(b'{"%b":%b}' % (name, DEEP) for name in (b"text", b"rid", b"unknown", b"stream")),
        b'{"text":3,"rid":%b}' % DEEP,
    ],
)
def test_what_the_gateway_cannot_read_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="must be"):
        wrap(body)


class Workers:
    """Two servers. Each answers every request with its number, the path below its secret path, the key, and
    the body."""

    async def __aenter__(self) -> Workers:
        self.runners, self.urls = [], []
        for number in range(2):
            app = web.Application()
            app["number"] = number
            app.router.add_route("*", "/{secret}/{path:.*}", self.handle)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.runners.append(runner)
            self.urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        self.seen: list[tuple[int, str]] = []
        return self

    async def __aexit__(self, *_: object) -> None:
        for runner in self.runners:
            await runner.cleanup()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path, number = request.match_info["path"], request.app["number"]
        if path == "health":
            return web.Response()
        self.seen.append((number, path))
        text = await request.text()
        if '"stream":true' in text:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for piece in (b"data: 1\n\n", b"data: [DONE]\n\n"):
                await response.write(piece)
            return response
        said = {"number": number, "path": path, "body": json.loads(text or "null")}
        said["adapter"] = request.headers.get(ADAPTER_HEADER)
        status = 400 if "refuse" in text else 200
        return web.json_response({**said, "key": request.headers.get("Authorization")}, status=status)


@pytest.fixture
def router(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[VllmRouter]:
    argv, adapter = ("--policy", "consistent_hash"), getattr(request, "param", "")
    log = str(tmp_path / "router.log")
    spec = RouterSpec(run_key=KEY, log_path=log, argv=argv, adapter=adapter, checkpoint="/models/m")
    router = VllmRouter(spec)
    router.start()
    router.wait_ready()
    yield router
    router.stop()


@pytest.mark.parametrize("router", ["maths"], indirect=True)
def test_the_run_s_adapter_reaches_the_engines(router: VllmRouter) -> None:
    async def run() -> None:
        async with Workers() as workers, aiohttp.ClientSession() as session:
            await asyncio.to_thread(router.add, workers.urls[0])

            async def ask(path: str, body: Any) -> Any:
                async with session.post(router.spec.gateway_url + path, json=body, headers=HEADERS) as answer:
                    return await answer.json()

            assert (await ask("/generate", {"text": "a"}))["body"]["vime_adapter"] == "maths"
            for path, body in (
                ("/v1/completions", {"model": "policy", "prompt": "a"}),
                ("/v1/chat/completions", {"model": "policy", "messages": [{"role": "user", "content": "a"}]}),
                ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}}),
            ):
                assert (await ask(path, body))["body"]["model"] == "maths", path
            for path in ("/abort_request", "/abort_requests"):
                assert (await ask(path, {"abort_all": True}))["adapter"] == "maths"

    asyncio.run(run())


def test_the_gateway_and_the_router(router: VllmRouter) -> None:
    gateway = f"http://127.0.0.1:{router.spec.gateway_port}"

    async def run() -> None:
        async with Workers() as workers, aiohttp.ClientSession() as session:
            for url in workers.urls:
                await asyncio.to_thread(router.add, url)

            async def ask(method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
                named = {name.replace("_", "-"): value for name, value in headers.items()}
                async with session.request(
                    method, gateway + path, json=body, headers=HEADERS | named
                ) as answer:
                    return answer.status, await answer.json(content_type=None)

            body = {"text": "a", "n": 3, "image_data": ["x"]}
            status, said = await ask("POST", "/generate", body)
            assert (status, said["path"], said["key"]) == (200, "inference/v1/generate", f"Bearer {KEY}")
            assert said["body"][WRAPPED] == body
            assert (await ask("POST", "/generate", {"text": "refuse"}))[0] == 400
            for header in ("x_session_id", "x_smg_routing_key"):
                for path in ("/generate", "/inference/v1/generate"):
                    many = {"token_ids": [1], "sampling_params": {}} if "inference" in path else body
                    for session_id in "abcdef":
                        found = [await ask("POST", path, many, **{header: session_id}) for _ in range(3)]
                        assert len({said["number"] for _, said in found}) == 1, (header, path)
            for path in ("abort_request", "abort_requests", "flush_cache"):
                workers.seen.clear()
                assert (await ask("POST", f"/{path}", {"abort_all": True}))[1]["key"] == f"Bearer {KEY}"
                assert sorted(workers.seen) == [(0, path), (1, path)]
            assert (await ask("GET", "/model_info"))[1]["path"] == "get_model_info"
            assert len((await ask("GET", "/workers"))[1]["workers"]) == 2
            async with session.post(
                gateway + "/generate", json={**body, "stream": True}, headers=HEADERS
            ) as answer:
                assert await answer.text() == "data: 1\n\ndata: [DONE]\n\n"
            workers.seen.clear()
            for wrong in ({}, {"Authorization": "Bearer wrong"}):
                for path in (
                    "/generate",
                    "/abort_request",
                    "/flush_cache",
                    "/inference/v1/generate",
                    "/nowhere",
                ):
                    sent = {"token_ids": [1], "sampling_params": {}}
                    async with session.post(gateway + path, json=sent, headers=wrong) as answer:
                        assert answer.status == 401, path
                for path in ("/generate", "/v1/completions", "/inference/v1/generate", "/nowhere"):
                    for data in (b"{bad", b"", b'{"a": 1}'):
                        async with session.post(gateway + path, data=data, headers=wrong | JSON) as answer:
                            assert answer.status == 401, (path, data)
            async with session.post(
                gateway + "/v1/completions", data=b"{bad", headers=HEADERS | JSON
            ) as answer:
                assert answer.status == 400
            assert workers.seen == []

    asyncio.run(run())


def test_plug_ins_of_upstream_name_the_checkpoint_and_render_messages(router: VllmRouter) -> None:
    async def run() -> None:
        async with Workers() as workers, aiohttp.ClientSession() as session:
            for url in workers.urls:
                await asyncio.to_thread(router.add, url)
            asked = {
                "model": "/models/m",
                "token_ids": [1],
                "sampling_params": {},
                "prompt": "a",
                "messages": [],
            }
            for path in ("v1/chat/completions/render", "inference/v1/generate", "v1/completions"):
                url = f"{router.spec.gateway_url}/{path}"
                async with session.post(url, json=asked, headers=HEADERS) as answer:
                    said = await answer.json(content_type=None)
                assert (answer.status, said["path"], said["key"]) == (200, path, f"Bearer {KEY}")
                assert said["body"]["model"] == "policy"
            assert len(workers.seen) == 3
            url = f"{router.spec.gateway_url}/v1/chat/completions/render"
            async with session.post(url, json={"x": "refuse"}, headers=HEADERS) as answer:
                assert answer.status == 400

    asyncio.run(run())


def answer_to_headers(port: int, length: int, *headers: str) -> str:
    """Returns the status line that arrives before any byte of a body is sent."""
    sent = ["POST /generate HTTP/1.1", "Host: x", f"Content-Length: {length}", *headers]
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(("\r\n".join(sent) + "\r\n\r\n").encode())
        return connection.makefile().readline().strip()


def test_bodies_are_read_after_the_key_and_bounded(router: VllmRouter) -> None:
    port, key = router.spec.gateway_port, f"Authorization: Bearer {KEY}"
    assert "401" in answer_to_headers(port, 900 << 20)
    assert "401" in answer_to_headers(port, 900 << 20, "Authorization: Bearer \xff\xfe")
    assert "413" in answer_to_headers(port, 900 << 20, key)
    assert "413" in answer_to_headers(router.spec.port, 900 << 20, key, "Content-Type: application/json")

    async def run() -> None:
        async def endless() -> AsyncIterator[bytes]:
            for _ in range(2 * (LARGEST_BODY_BYTES >> 20)):
                yield bytes(1 << 20)

        async with aiohttp.ClientSession() as session:
            for data, expected in ((DEEP, 400), (b'{"text":%b}' % DEEP, 400), (endless(), 413)):
                async with session.post(
                    router.spec.gateway_url + "/generate", data=data, headers=HEADERS | JSON
                ) as answer:
                    assert answer.status == expected, await answer.text()

    asyncio.run(run())
