"""Tests the real sglang-router in front of servers that report their requests. With an engine:
e2e/engines/conformance/test_backend_conformance.py."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from vime.pool.asgi import health_prefix
from vime.pool.router import RouterSpec
from vime.sglang.client import PARAMETERS, SglangEngineClient
from vime.sglang.router import SglangRouter
from vime.sglang_api.request import parse
from vime.vllm.worker.sglang_routes import require_whole

KEY = "secret"
HEADERS = {"Authorization": f"Bearer {KEY}"}
HIDDEN = health_prefix(KEY)


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangRouter]:
    log = tmp_path_factory.mktemp("router") / "router.log"
    router = SglangRouter(RouterSpec(run_key=KEY, log_path=str(log)))
    router.start()
    router.wait_ready()
    yield router
    router.stop()
    assert KEY not in log.read_text()


@contextlib.asynccontextmanager
async def worker(seen: list[tuple[str, Any, list[str]]], *, hidden: bool) -> AsyncIterator[str]:
    """Runs a server that records path, body and keys per request. `hidden`: only a secret path has /health."""

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        seen.append((request.path, json.loads(body or b"null"), request.headers.getall("Authorization", [])))
        is_open = request.path == (HIDDEN if hidden else "") + "/health"
        if not is_open and HEADERS["Authorization"] not in request.headers.getall("Authorization", []):
            return web.json_response({}, status=404 if request.path.endswith("/health") else 401)
        meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": [[-1.0, 7, None]]}
        return web.json_response({"text": "a", "output_ids": [7], "meta_info": meta, "model_path": "m"})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def test_the_address_is_the_gateways_and_the_command_has_no_key(router: SglangRouter) -> None:
    assert router.spec.gateway_url == router.spec.url
    assert KEY not in router.command()


@pytest.mark.parametrize("hidden", [False, True], ids=["SGLang", "vLLM"])
def test_an_engine_joins_serves_and_leaves(router: SglangRouter, hidden: bool) -> None:
    async def run() -> None:
        seen: list[tuple[str, Any, list[str]]] = []
        async with worker(seen, hidden=hidden) as url:
            await asyncio.to_thread(router.add, url)
            assert await asyncio.to_thread(router.engines) == [url]
            client = SglangEngineClient(router.spec.url, KEY)
            values = dict.fromkeys(PARAMETERS, 1) | {"top_p": 0.5, "stop": ["x"], "stop_token_ids": [3]}
            values |= dict.fromkeys(("skip_special_tokens", "no_stop_trim", "ignore_eos"), True)
            result = await client.generate([5, 6], values, seed=11, deadline_s=20)
            assert (result.token_ids, result.log_probs) == ([7], [-1.0])
            path, body, keys = seen[-1]
            assert path == (HIDDEN if hidden else "") + "/generate" and HEADERS["Authorization"] in keys
            # All fields of the client arrive, and the router's additional fields have no effect.
            assert body["sampling_params"] == {**values, "sampling_seed": 11}
            assert (body["input_ids"], body["return_logprob"]) == ([5, 6], True)
            whole = json.dumps(body, separators=(",", ":")).encode()
            require_whole(whole)
            assert parse(whole).each == parse(json.dumps({k: body[k] for k in SENT}).encode()).each
            await client.abort_all()
            assert seen[-1][:2] == ((HIDDEN if hidden else "") + "/abort_request", {"abort_all": True})
            await client.close()
            await asyncio.to_thread(router.remove, url)
            assert await asyncio.to_thread(router.engines) == []

    asyncio.run(run())


SENT = ("input_ids", "sampling_params", "return_logprob")


def test_routes_need_the_key(router: SglangRouter) -> None:
    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            for method, path in [
                ("POST", "/generate"),
                ("GET", "/workers"),
                ("POST", "/workers"),
                ("DELETE", "/workers/x"),
                ("POST", "/flush_cache"),
            ]:
                for headers in ({}, {"Authorization": "Bearer wrong"}):
                    body = {"text": "a", "url": "http://127.0.0.1:9"}
                    async with session.request(
                        method, router.spec.url + path, json=body, headers=headers
                    ) as said:
                        assert said.status == 401, (method, path)

    asyncio.run(run())


def test_a_body_that_vllm_router_has_cut_is_refused_and_one_of_sglang_router_is_not() -> None:
    cut = b'{"input_ids":[1],"sampling_params":{},"stream":false,"return_logprob":true,"return_hidden_states":false}'
    with pytest.raises(ValueError, match=r"must go to args\.sglang_router_ip"):
        require_whole(cut)
    require_whole(cut[:-1] + b',"no_logs":false}')
    for name in ("background", "return_bytes", "return_entropy"):
        parse(cut[:-1] + b',"%b":false}' % name.encode())
        with pytest.raises(ValueError, match=f"{name} must be left out, got bool 'True'"):
            parse(cut[:-1] + b',"%b":true}' % name.encode())


def test_an_engine_that_does_not_answer_is_not_added(
    router: SglangRouter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("vime.sglang.router.REQUEST_S", 1.5)
    with pytest.raises(
        RuntimeError, match=r"sglang-router must add the engine http://127\.0\.0\.1:9 within 1\.5 s"
    ):
        router.add("http://127.0.0.1:9")
