"""Middleware of an engine server: it checks the run's key on every route, and reports the weight versions of an answer.

vLLM's own --api-key leaves the control routes open, so servers are started with `--middleware
vime.vllm.worker.middleware.RunKeyMiddleware` instead. A header of the answer has the weight versions that were live
while the request was served. The version is kept in this process, so the server must have one API process.

vllm-router sends GET /health without any key. Its workers are therefore registered under a path that holds a secret
derived from the key (`vime.pool.asgi.health_prefix`). Below that path, only /health answers without the key. The
proof that this server has the key (`slime.peers.proof`) needs no key either. Every other request is read only after its
key is checked, and a request larger than LARGEST_BODY_BYTES is not kept.
"""

from __future__ import annotations

import functools
import os
from urllib.parse import urlencode

from slime.peers.proof import PROOF_PATH
from vime.pool.asgi import (
    KEY_VARIABLE,
    App,
    Message,
    Receive,
    Scope,
    Send,
    answer,
    bounded,
    has_key,
    health_prefix,
    prove,
    refuse,
)
from vime.pool.control import ADAPTER_HEADER
from vime.sglang_api.request import ROUTES, WRAPPED
from vime.vllm.caches import prefill
from vime.vllm.caches.ages import CacheAges
from vime.vllm.caches.prefill import Prefills
from vime.vllm.cpu.memory import return_cache
from vime.vllm.group_wire import SAMPLES
from vime.vllm.worker.adapter import ServedAdapters, abort_all
from vime.vllm.worker.columns.token_versions import TokenVersions

VERSIONS_HEADER = "x-weight-versions"
NEW_VERSION_HEADER = "x-new-weight-version"

KEEPS_CACHE = {"clear_cache": "false"}
"""Query of /pause with which the engine keeps its keys and values. Otherwise vLLM drops them."""

_SAMPLES = f'"{SAMPLES}":'.encode()
_WRAPPED = f'"{WRAPPED}":'.encode()
_READ = ROUTES | {("POST", "/v1/completions"), ("POST", "/inference/v1/generate")}
"""Routes whose body decides whether this project or vLLM serves the request."""
_EMPTIES_CACHE = {"/pause", "/reset_prefix_cache"}
"""Control routes after which the key-value cache may be empty."""
_SERIAL_PATHS = {"/pause", "/resume", "/abort_requests"}
"""Control routes that concern an adapter's requests."""


class RunKeyMiddleware:
    """ASGI middleware: answers 401 without the run's key, on every route and websocket, and adds `x-weight-versions`.

    The header lists the versions that were live from the arrival of a request to its first response byte, oldest first.
    So for a generation request that is answered whole (not streamed), it lists all versions that may have sampled its
    tokens. A successful POST /finish_weight_update with `x-new-weight-version: V` makes V the live version. Each
    adapter has separate versions: `x-adapter: NAME` names the adapter of a request. Raises KeyError at start-up when
    $VIME_RUN_KEY is not set: a server without a key must not run.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        self.run_key = os.environ[KEY_VARIABLE]
        if not self.run_key:
            raise ValueError(f"{KEY_VARIABLE} must not be empty; the engine pool sets it")
        self.prefix = health_prefix(self.run_key)
        self.token_versions, self.adapters = TokenVersions(), ServedAdapters()
        self.running: dict[str, str] = {}
        self.ages: CacheAges | None = None
        self.prefills = Prefills(self.run_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        routed = scope["path"].startswith(self.prefix + "/")
        if routed:
            path = scope["path"].removeprefix(self.prefix)
            scope = {**scope, "path": path, "raw_path": path.encode()}
        is_health = routed and (scope["path"], scope.get("method")) == ("/health", "GET")
        if scope["path"] == PROOF_PATH and scope.get("method") == "GET":
            await prove(scope, send, self.run_key)
        elif not is_health and not has_key(scope["headers"], self.run_key):
            await refuse(scope, send)
        elif scope["type"] == "websocket":
            await self.app(scope, receive, send)
        else:
            await bounded(scope, receive, send, functools.partial(self._serve, routed=routed))

    async def _serve(self, scope: Scope, receive: Receive, send: Send, *, routed: bool) -> None:
        if scope["method"] == "POST" and scope["path"] in _SERIAL_PATHS:
            await self._serialize_updates(scope, receive, send)
        elif (scope["method"], scope["path"]) == ("POST", prefill.PATH):
            await prefill.take_urls(self.prefills, receive)
            await answer(send, 200)
        elif (scope["method"], scope["path"]) in _READ:
            await self._read(scope, receive, send, routed=routed)
        else:
            await self.app(scope, receive, self._annotate(scope, send))

    async def _read(self, scope: Scope, receive: Receive, send: Send, *, routed: bool) -> None:
        """Serves requests for a group of samples (group_route) and SGLang's routes (sglang_routes). Passes other
        requests to vLLM."""
        self.token_versions.install()
        since, adapter = self.token_versions.since(), _read_adapter(scope)
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        route = scope["method"], scope["path"]
        if route == ("POST", "/v1/completions") and _SAMPLES in body:
            from vime.vllm.worker import group_route

            engine = scope["app"].state.engine_client
            if self.ages is None and CacheAges.needed():
                self.ages = CacheAges(engine.vllm_config.cache_config.block_size)
            caches = self.ages, self.prefills
            await group_route.answer(engine, bytes(body), receive, send, since, self.adapters, *caches)
        elif route in ROUTES or _WRAPPED in body:
            from vime.vllm.worker import sglang_routes

            llm = scope["app"].state.engine_client
            ours = sglang_routes.ServedEngine(
                *(llm, lambda: since(adapter), self.running, self.token_versions.change),
                *(self.adapters, adapter),
            )
            await sglang_routes.answer(
                ours, route, bytes(body), receive, self._annotate(scope, send), routed=routed
            )
        else:
            whole: list[Message] = [{"type": "http.request", "body": bytes(body)}]

            async def again() -> Message:
                return whole.pop() if whole else await receive()

            await self.app(scope, again, self._annotate(scope, send))

    async def _serialize_updates(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the updates of the engine's adapters one after the other. A run aborts only its own requests."""
        adapter, path = _read_adapter(scope), scope["path"]
        if path == "/pause":
            try:
                await self.adapters.begin(adapter or "")
            except ValueError as error:
                await answer(send, 409, error=str(error))
                return
            await self.prefills.drain()
        elif path == "/resume" and not self.adapters.end(adapter or ""):
            await answer(send, 200, message="another adapter is updated; the end of that resumes the engine")
            return
        if path == "/abort_requests":
            self.prefills.abort()
        if path == "/abort_requests" and adapter is not None:
            await abort_all(scope["app"].state.engine_client, adapter)
            await answer(send, 200, message=f"requests of {adapter} are aborted")
            return
        await self.app(scope, receive, self._annotate(scope, send))
        if path == "/resume":
            self.prefills.resume()

    def _annotate(self, scope: Scope, send: Send) -> Send:
        since, adapter = self.token_versions.since(), _read_adapter(scope)
        new = [value for name, value in scope["headers"] if name == NEW_VERSION_HEADER.encode()]

        async def annotated(message: Message) -> None:
            if message["type"] == "http.response.start":
                if new and scope["path"] == "/finish_weight_update" and message["status"] == 200:
                    state, name = scope["app"].state, adapter or ""
                    await self.token_versions.change(state.engine_client, int(new[0]), name)
                    if name:
                        self.adapters.serve(name, state.openai_serving_models)
                if scope["path"] in _EMPTIES_CACHE and message["status"] == 200 and not _keeps_cache(scope):
                    await return_cache(scope["app"].state.engine_client)
                    if self.ages is not None:
                        self.ages.flush()
                live = ",".join(map(str, since(adapter)))
                message["headers"] = [*message["headers"], (VERSIONS_HEADER.encode(), live.encode())]
            await send(message)

        return annotated


def _keeps_cache(scope: Scope) -> bool:
    return urlencode(KEEPS_CACHE).encode() in scope["query_string"]


def _read_adapter(scope: Scope) -> str | None:
    """Returns the adapter's name in `ADAPTER_HEADER`, or None."""
    found = [value for name, value in scope["headers"] if name == ADAPTER_HEADER.encode()]
    return found[0].decode("latin-1") if found else None
