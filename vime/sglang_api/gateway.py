"""Runs the process in front of vllm-router that plug-ins call, with SGLang's routes and with vLLM's.

vllm-router 0.1.17 cannot serve these calls: it drops fields of POST /generate that its own record lacks, sends
/abort_request to one engine only, and sends /flush_cache without the key. It keeps all fields of
/inference/v1/generate. So this process

- puts a body of /generate into one field of /inference/v1/generate, and the router balances the request;
- sends /abort_request and /flush_cache to every engine;
- sends /v1/chat/completions/render to one engine;
- passes every other request to the router;
- names the run's adapter, if it has one, in requests that name none.

It checks the run's key, from $VIME_RUN_KEY, before it reads a body. The router and the engines check the key again.
Callers reach a separately started router (`vime serve router`) only through this process, which proves to them that it
has the key (`slime.peers.proof`).
"""

from __future__ import annotations

import asyncio
import gc
import hmac
import os
import random
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict

from slime.config.child_environment import NO_KEY
from slime.peers.proof import PROOF_PATH, proof
from slime.peers.proven_connector import ProvenConnector, RunKey
from vime.pool.asgi import KEY_VARIABLE, LARGEST_BODY_BYTES
from vime.pool.control import ADAPTER_HEADER, SERVED_MODEL_NAME
from vime.sglang_api.request import WRAPPED, parse

_TO_ALL = ("/abort_request", "/abort_requests", "/flush_cache")
_TO_ONE = ("/v1/chat/completions/render",)
"""Routes that vllm-router forwards without the caller's key. They need no weights, so any engine serves them."""
_OLDER_NAMES = {"/model_info": "/get_model_info", "/server_info": "/get_server_info"}
"""Maps paths that vllm-router forwards without the caller's key to older names, which it forwards with the key."""
_CONNECTION_HEADERS = {"connection", "content-length", "expect", "host", "keep-alive", "transfer-encoding"}
_SGLANGS_SESSION = "x-smg-routing-key"
"""Header that sglang-router's sticky policies read. vllm-router's policies read x-session-id."""
_ALL_S = 60.0


class _Peek(msgspec.Struct):
    stream: bool | None = None
    input_ids: msgspec.Raw = msgspec.Raw(b"null")


def wrap(body: bytes, adapter: str = "") -> bytes:
    """Returns a body of /inference/v1/generate that contains a body of /generate, for `adapter` unless the body names
    another.

    Raises ValueError that names a malformed field. The outer body also has the token ids, for the router's policies
    that read the prompt, and `stream`, which the router needs.
    """
    try:
        peek = msgspec.json.decode(body, type=_Peek)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        parse(body)
        raise ValueError(f"the body must be a JSON object of /generate, got {body[:80]!r}: {error}") from None
    try:
        msgspec.json.decode(peek.input_ids, type=list[int])
        ids = bytes(peek.input_ids)
    except msgspec.DecodeError:  # text, or a batch
        ids = b"[0]"
    stream = b"true" if peek.stream else b"false"
    named = b'"vime_adapter":%b,' % msgspec.json.encode(adapter) if adapter else b""
    return b'{"token_ids":%b,"sampling_params":{},"stream":%b,%b"%b":%b}' % (
        ids,
        stream,
        named,
        WRAPPED.encode(),
        body,
    )


def with_model(body: bytes, adapter: str, checkpoint: str = "") -> bytes:
    """Returns a body of a route of vLLM with the model `adapter`, if the body named no model or the base. The base has
    the name `checkpoint` too, which plug-ins of upstream vime use (`args.hf_checkpoint`).

    Other bodies are returned unchanged.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        model = msgspec.json.decode(fields.get("model", b"null"), type=str | None)
    except (
        msgspec.DecodeError,
        UnicodeDecodeError,
        RecursionError,
        TypeError,
    ):  # vLLM reports the error
        return body
    if model not in ((None, SERVED_MODEL_NAME, checkpoint) if adapter else (checkpoint,)):
        return body
    return msgspec.json.encode({**fields, "model": adapter or SERVED_MODEL_NAME})


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Gateway:
    """Handles HTTP requests in front of the router at `router_url`, for engines that serve `checkpoint`, and a run
    whose adapter is `adapter`, if it has one."""

    def __init__(self, router_url: str, run_key: str, adapter: str = "", checkpoint: str = "") -> None:
        self._url, self._run_key, self._adapter, self._checkpoint = router_url, run_key, adapter, checkpoint

    async def serve(self, listening: socket.socket) -> None:
        """Serves until cancelled."""
        app = web.Application(client_max_size=LARGEST_BODY_BYTES, middlewares=[self._guard])
        app.router.add_post("/generate", self.generate)
        app.router.add_route("*", "/{path:.*}", self.other)
        async with aiohttp.ClientSession(
            connector=ProvenConnector(lambda _: RunKey(self._run_key), limit=0, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            trust_env=False,
        ) as self._session:
            runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
            await runner.setup()
            await web.SockSite(runner, listening).start()
            await asyncio.Event().wait()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuses a request without the key before anything else is read. Only a challenge needs no key."""
        if (request.method, request.path) == ("GET", PROOF_PATH):
            return self._prove(request)
        authorization = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(authorization, b"Bearer " + self._run_key.encode()):
            return web.json_response({"error": {"message": NO_KEY}}, status=401)
        if (request.content_length or 0) > LARGEST_BODY_BYTES:
            raise web.HTTPRequestEntityTooLarge(LARGEST_BODY_BYTES, request.content_length or 0)
        return await handler(request)

    def _prove(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        host, port = request.transport.get_extra_info("sockname")[:2]
        try:
            return web.Response(text=proof(self._run_key, request.query.get("challenge", ""), host, port))
        except ValueError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        try:
            body = wrap(await request.read(), self._adapter)
        except ValueError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        return await self._pass(request, "/inference/v1/generate", body)

    async def other(self, request: web.Request) -> web.StreamResponse:
        if request.path in _TO_ALL:
            return await self._to_all(request)
        if request.path in _TO_ONE:
            return await self._to_one(request)
        path, body = _OLDER_NAMES.get(request.path, request.path), None
        if request.method == "POST" and "/v1/" in path:
            body = await request.read()
            if self._adapter or (self._checkpoint and msgspec.json.encode(self._checkpoint) in body):
                body = with_model(body, self._adapter, self._checkpoint)
        query = request.rel_url.raw_path_qs[len(request.rel_url.raw_path) :]
        return await self._pass(request, path + query, body)

    async def _pass(self, request: web.Request, path: str, body: bytes | None = None) -> web.StreamResponse:
        """Returns the router's answer: at once if it has a length, otherwise as a stream."""
        data = await request.read() if body is None else body
        headers = _forwarded(request.headers)
        if _SGLANGS_SESSION in headers:
            headers.setdefault("x-session-id", headers[_SGLANGS_SESSION])
        async with self._session.request(
            request.method, self._url + path, data=data or None, headers=headers
        ) as answer:
            headers = _forwarded(answer.headers)
            if answer.content_length is not None:
                return web.Response(status=answer.status, body=await answer.read(), headers=headers)
            response = web.StreamResponse(status=answer.status, headers=headers)
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response

    async def _to_all(self, request: web.Request) -> web.StreamResponse:
        """Calls every engine. The status is the worst one. A dead engine counts as done."""
        headers, data = _forwarded(request.headers), await request.read()
        if self._adapter:
            headers[ADAPTER_HEADER] = self._adapter
        limit = aiohttp.ClientTimeout(total=_ALL_S)

        async def ask(url: str) -> tuple[int, str]:
            async with self._session.request(
                request.method, url + request.path, data=data or None, headers=headers, timeout=limit
            ) as answer:
                return answer.status, await answer.text()

        urls = await self._engines(request)
        if isinstance(urls, web.Response):
            return urls
        results = await asyncio.gather(*map(ask, urls), return_exceptions=True)
        answers = [one for one in results if not isinstance(one, BaseException)]
        for one in results:
            if isinstance(one, BaseException) and not isinstance(one, aiohttp.ClientError | OSError):
                raise one
        status, text = max(answers, default=(503, '{"error": {"message": "no engine answers"}}'))
        return web.Response(status=status, text=text, content_type="application/json")

    async def _to_one(self, request: web.Request) -> web.StreamResponse:
        """Calls one engine, chosen by chance."""
        urls = await self._engines(request)
        if isinstance(urls, web.Response):
            return urls
        body = with_model(await request.read(), self._adapter, self._checkpoint)
        async with self._session.post(
            random.choice(urls) + request.path, data=body, headers=_forwarded(request.headers)
        ) as answer:
            return web.Response(
                status=answer.status, body=await answer.read(), headers=_forwarded(answer.headers)
            )

    async def _engines(self, request: web.Request) -> list[str] | web.Response:
        """Returns the addresses of the router's engines, or the router's answer if it is an error."""
        async with self._session.get(
            f"{self._url}/list_workers", headers=_forwarded(request.headers)
        ) as listed:
            if listed.status != 200:
                return web.Response(status=listed.status, text=await listed.text())
            urls: list[str] = (await listed.json(content_type=None))["urls"]
        return urls or web.Response(status=503, text='{"error": {"message": "no engine answers"}}')


def _forwarded(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Returns the headers that do not belong to the connection."""
    return CIMultiDict(
        (name, value) for name, value in headers.items() if name.lower() not in _CONNECTION_HEADERS
    )


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at once, so that early callers wait until the process serves."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=1024)
    listening.setblocking(False)
    return listening


def serve(router_url: str, listening: socket.socket, adapter: str = "", checkpoint: str = "") -> None:
    """Serves until the process ends."""
    import uvloop  # a dependency of vLLM

    gc.freeze()
    uvloop.run(Gateway(router_url, os.environ[KEY_VARIABLE], adapter, checkpoint).serve(listening))


if __name__ == "__main__":  # in front of a separately started router
    serve(sys.argv[3], listen(sys.argv[1], int(sys.argv[2])), *sys.argv[4:])
