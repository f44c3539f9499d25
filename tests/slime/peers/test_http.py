"""The run's key goes only to the run's own servers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from slime.event_loop import loop_objects
from slime.peers import http
from slime.utils.http_utils import get, post

KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(autouse=True)
def own() -> Iterator[None]:
    yield
    http.set_own_servers()


class Server:
    """A server that answers with the key of its request. /moved redirects to `elsewhere`."""

    elsewhere = ""
    workers: list[str] = []

    async def __aenter__(self) -> Server:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        self.asked: list[str] = []
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append(request.path_qs)
        if request.path == "/moved":
            raise web.HTTPTemporaryRedirect(self.elsewhere)
        if request.path == "/list_workers":
            return web.json_response({"urls": self.workers})
        return web.json_response({"key": request.headers.get("Authorization")})


def run(body: Any) -> None:
    async def with_servers() -> None:
        async with Server() as router, Server() as engine, Server() as stranger:
            http.set_own_servers(http.OwnServers([router.url], KEY, router.url + "/list_workers", "/secret"))
            await body(router, engine, stranger)

    asyncio.run(with_servers())


def test_each_model_of_the_run_has_its_own_key() -> None:
    async def body(router: Server, engine: Server, stranger: Server) -> None:
        judges = {"Authorization": "Bearer judge"}
        http.set_own_servers(http.OwnServers([router.url], KEY), http.OwnServers([stranger.url], judges))
        assert await post(router.url + "/x", {}) == {"key": KEY["Authorization"]}
        assert await post(stranger.url + "/x", {}) == {"key": "Bearer judge"}
        assert await post(engine.url + "/x", {}) == {"key": None}

    run(body)


@pytest.mark.parametrize("kept", [False, True])
def test_the_router_gets_the_key_and_a_stranger_does_not(kept: bool) -> None:
    async def body(router: Server, engine: Server, stranger: Server) -> None:
        if kept:
            loop_objects().closes = True
        assert await post(router.url + "/generate", {}) == {"key": KEY["Authorization"]}
        assert await get(router.url + "/x", {"a": 1}) == {"key": KEY["Authorization"]}
        assert router.asked == ["/generate", "/x?a=1"]
        assert await post(router.url + "/generate", {}, headers={"Authorization": "mine"}) == {"key": "mine"}
        assert await post(stranger.url + "/generate", {}) == {"key": None}
        assert await post(stranger.url.replace("127.0.0.1", "localhost") + "/x", {}) == {"key": None}
        await loop_objects().close()

    run(body)


def test_an_engine_gets_the_key_if_the_router_lists_it() -> None:
    async def body(router: Server, engine: Server, stranger: Server) -> None:
        router.workers = [engine.url + "/secret"]
        assert await post(engine.url + "/generate", {}) == {
            "key": None
        }  # not a path of an engine, so no request is sent
        assert router.asked == []
        assert await post(stranger.url + "/secret/generate", {}) == {"key": None}
        assert await post(engine.url + "/secret/generate", {}) == {"key": KEY["Authorization"]}
        assert await post(engine.url + "/generate", {}) == {"key": KEY["Authorization"]}
        assert router.asked == ["/list_workers"]

    run(body)


def test_a_redirect_does_not_carry_the_key_away() -> None:
    async def body(router: Server, engine: Server, stranger: Server) -> None:
        router.elsewhere = stranger.url + "/x"
        with pytest.raises(ValueError, match="must accept the request, got HTTP 307"):
            await post(router.url + "/moved", {})
        assert stranger.asked == []
        engine.elsewhere = stranger.url + "/x"
        assert await post(engine.url + "/moved", {}) == {
            "key": None
        }  # not a server of the run, so the request has no key

    run(body)
