"""Tests the key in front of every route, and the weight versions in an answer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock
from urllib.parse import quote

import pytest
from vllm.v1.engine.output_processor import RequestState

from slime.peers.proof import proof
from vime.pool.asgi import LARGEST_BODY_BYTES, health_prefix
from vime.vllm.worker import adapter
from vime.vllm.worker.middleware import RunKeyMiddleware

KEY = "secret"
AUTHORIZED = [(b"authorization", b"Bearer secret")]


class ProtectedApp:
    """The middleware around an app that reports the path of its request, and that a test can hold back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VIME_RUN_KEY", KEY)
        monkeypatch.setattr(RequestState, "_new_completion_output", RequestState._new_completion_output)
        processor = SimpleNamespace(request_states={})
        model = SimpleNamespace(max_model_len=64, get_vocab_size=lambda: 100)
        self.is_paused, self.is_empty, self.calls = False, True, list[str]()
        self.llm = SimpleNamespace(output_handler=None, output_processor=processor, model_config=model)
        self.llm.is_paused = AsyncMock(side_effect=lambda: self.is_paused)
        self.llm.reset_prefix_cache = AsyncMock(side_effect=lambda: self.is_empty)
        self.llm.collective_rpc = AsyncMock(side_effect=self.calls.append)
        self.models = SimpleNamespace(lora_requests={})
        self.reached: list[str] = []
        self.status = 200
        self.pieces: Iterable[bytes] = [b"{}"]
        self.taken, self.query, self.body = 0, b"", b""
        self.hold = asyncio.Event()
        self.hold.set()
        self.middleware = RunKeyMiddleware(self.app)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append(scope["path"])
        await self.hold.wait()
        while scope["path"] == "/reads" and (await receive())["more_body"]:
            pass
        await send({"type": "http.response.start", "status": self.status, "headers": [(b"x-own", b"1")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def ask(
        self, path: str, headers: list[tuple[bytes, bytes]], method: str = "GET", kind: str = "http"
    ) -> tuple[int, dict[bytes, bytes]]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": kind, "path": path, "raw_path": path.encode(), "headers": headers}
        scope |= {"query_string": self.query, "server": ("127.0.0.1", 8000)}
        state = SimpleNamespace(engine_client=self.llm, openai_serving_models=self.models)
        scope["app"] = SimpleNamespace(state=state)
        if kind == "http":
            scope["method"] = method

        pieces = iter(self.pieces)

        async def receive() -> Any:
            self.taken += 1
            piece = next(pieces, None)
            return {"type": "http.request", "body": piece or b"", "more_body": piece is not None}

        await self.middleware(scope, receive, send)
        if kind == "websocket":
            return sent[0].get("code", 0), {}
        self.body = sent[-1]["body"]
        return sent[0]["status"], dict(sent[0]["headers"])

    def status_of(self, path: str, headers: list[tuple[bytes, bytes]], **how: str) -> int:
        return asyncio.run(self.ask(path, headers, **how))[0]


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> ProtectedApp:
    return ProtectedApp(monkeypatch)


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"Bearer wrong")],
        [(b"authorization", b"Bearer secret2")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"secret")],
        [(b"authorization", b"Basic secret")],
        [(b"x-api-key", b"secret")],
        [*AUTHORIZED, (b"authorization", b"Bearer wrong")],
        [(b"authorization", "Bearer sécret".encode("latin-1"))],
    ],
)
def test_without_the_right_key_nothing_is_reached(
    app: ProtectedApp, headers: list[tuple[bytes, bytes]]
) -> None:
    for path in ("/health", "/metrics", "/pause", "/v1/completions", "/", health_prefix(KEY)):
        for method in ("GET", "POST", "OPTIONS", "HEAD", "DELETE"):
            assert app.status_of(path, headers, method=method) == 401
    assert app.status_of("/v1/realtime", headers, kind="websocket") == 1008
    assert app.reached == []


def test_with_the_key_all_is_reached(app: ProtectedApp) -> None:
    assert app.status_of("/pause", AUTHORIZED, method="POST") == 200
    assert app.reached == ["/pause"]


@pytest.mark.parametrize("path", ["/pause", "/reset_prefix_cache", "/resume"])
@pytest.mark.parametrize("is_paused", [True, False])
@pytest.mark.parametrize("is_empty", [True, False])
def test_an_empty_cache_on_cpus_is_returned_while_the_engine_is_paused(
    app: ProtectedApp, monkeypatch: pytest.MonkeyPatch, path: str, is_paused: bool, is_empty: bool
) -> None:
    """Only an empty cache of a paused engine may be freed. Keys and values of a waiting request would become zeros."""
    from vllm import platforms

    monkeypatch.setattr(platforms.current_platform, "is_cpu", lambda: True)
    app.is_paused, app.is_empty = is_paused, is_empty
    assert app.status_of(path, AUTHORIZED, method="POST") == 200
    assert app.calls == (["return_memory"] if is_paused and is_empty and path != "/resume" else [])


def test_the_router_path_is_stripped_and_opens_health_alone(app: ProtectedApp) -> None:
    prefix = health_prefix(KEY)
    assert app.status_of(prefix + "/health", []) == 200
    assert app.status_of(prefix + "/v1/completions", AUTHORIZED, method="POST") == 200
    assert app.reached == ["/health", "/v1/completions"]
    for path in ("/v1/completions", "/health/", "/health/../pause", "//health", prefix + "/health"):
        assert app.status_of(prefix + path, []) == 401
    assert app.status_of(prefix + "/health", [], method="POST") == 401
    assert app.status_of(prefix + "/health", [], kind="websocket") == 1008
    assert app.status_of(health_prefix("other") + "/health", []) == 401
    assert prefix != health_prefix("other")
    assert KEY not in prefix


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/inference/v1/generate", "/reads"])
def test_no_body_is_kept_without_the_key_or_beyond_its_bound(app: ProtectedApp, path: str) -> None:
    piece = bytes(1 << 20)
    app.pieces = itertools.repeat(piece)  # it never ends
    assert app.status_of(path, [], method="POST") == 401 and app.taken == 0
    length = (b"content-length", str(LARGEST_BODY_BYTES + 1).encode())
    assert app.status_of(path, [*AUTHORIZED, length], method="POST") == 413 and app.taken == 0
    assert app.status_of(path, AUTHORIZED, method="POST") == 413
    assert app.taken == LARGEST_BODY_BYTES // len(piece) + 1


@pytest.mark.parametrize("deep", [b"[" * 200_000 + b"]" * 200_000, b"[" * 2_000])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", b'{"text":%b}'),
        ("/generate", b'{"unknown":%b}'),
        ("/generate", b'{"text":3,"rid":%b}'),
        ("/abort_request", b'{"rid":%b}'),
        ("/inference/v1/generate", b'{"vime_generate":%b}'),
        ("/inference/v1/generate", b'{"vime_generate":{"text":%b}}'),
        ("/v1/completions", b'{"prompt":[1],"vime_samples":{"shared":{"x":%b},"each":[{}]}}'),
        ("/update_weights_from_disk", b'{"model_path":%b}'),
    ],
)
def test_deep_json_is_refused(app: ProtectedApp, path: str, body: bytes, deep: bytes) -> None:
    app.pieces = [body % deep]
    assert app.status_of(path, AUTHORIZED, method="POST") == 400 and app.reached == []


@pytest.mark.parametrize("challenge", ["", "ab", "x" * 64, "é" * 64, "0" * 65])
def test_a_malformed_challenge_is_refused(app: ProtectedApp, challenge: str) -> None:
    app.query = f"challenge={quote(challenge)}".encode()
    assert app.status_of("/vime_proof", []) == 400


def test_the_proof_of_a_server_is_of_its_key_and_address(app: ProtectedApp) -> None:
    """GET of the proof needs no key, and POST does. A proof holds for one key and one address."""
    app.query = f"challenge={'ab' * 32}".encode()
    assert app.status_of("/vime_proof", []) == 200
    assert app.body == proof(KEY, "AB" * 32, "127.0.0.1", 8000).encode()
    others = [("x", "ab", "127.0.0.1", 8000), (KEY, "ac", "127.0.0.1", 8000), (KEY, "ab", "127.0.0.1", 8001)]
    others += [(KEY, "ab", "10.0.0.1", 8000), (KEY, "ab", "127.0.0.2", 8000)]
    proofs = {proof(key, 32 * digits, host, port) for key, digits, host, port in others}
    assert len(proofs) == len(others) and app.body.decode() not in proofs
    assert proof(KEY, "ab" * 32, "::ffff:10.0.0.1", 1) == proof(KEY, "ab" * 32, "10.0.0.1", 1)
    assert app.status_of("/vime_proof", [], method="POST") == 401 and app.reached == []


def test_an_answer_names_every_version_that_was_live(app: ProtectedApp) -> None:
    async def run() -> None:
        async def versions(path: str = "/v1/completions", *extra: tuple[bytes, bytes]) -> bytes:
            return (await app.ask(path, [*AUTHORIZED, *extra], "POST"))[1][b"x-weight-versions"]

        assert await versions() == b"-1"
        assert await versions("/finish_weight_update", (b"x-new-weight-version", b"3")) == b"-1,3"
        assert await versions() == b"3"
        app.hold.clear()
        slow = asyncio.create_task(versions())
        await asyncio.sleep(0)
        app.hold.set()
        await versions("/finish_weight_update", (b"x-new-weight-version", b"4"))
        await versions("/finish_weight_update", (b"x-new-weight-version", b"4"))
        assert await versions("/finish_weight_update", (b"x-new-weight-version", b"9")) == b"4,9"
        assert await slow in (b"3", b"3,4", b"3,4,9")
        assert await versions() == b"9"

    asyncio.run(run())


def test_a_request_held_over_two_updates_names_three_versions(app: ProtectedApp) -> None:
    async def run() -> bytes:
        app.hold.clear()
        slow = asyncio.create_task(app.ask("/v1/completions", AUTHORIZED, "POST"))
        await asyncio.sleep(0)
        for version in (1, 2):
            await app.middleware.token_versions.change(app.llm, version)
        app.hold.set()
        return (await slow)[1][b"x-weight-versions"]

    assert asyncio.run(run()) == b"-1,1,2"


def test_a_failed_or_misplaced_update_changes_no_version(app: ProtectedApp) -> None:
    new = (b"x-new-weight-version", b"3")
    app.status = 500
    assert app.status_of("/finish_weight_update", [*AUTHORIZED, new], method="POST") == 500
    app.status = 200
    assert app.status_of("/v1/completions", [*AUTHORIZED, new], method="POST") == 200
    assert app.middleware.token_versions.live() == [-1]


def test_each_adapter_has_versions_of_its_own(app: ProtectedApp) -> None:
    async def run() -> list[bytes]:
        async def versions(path: str, *names: bytes, version: bytes | None = None) -> bytes:
            new = [] if version is None else [(b"x-new-weight-version", version)]
            named = [(b"x-adapter", name) for name in names]
            return (await app.ask(path, [*AUTHORIZED, *named, *new], "POST"))[1][b"x-weight-versions"]

        found = [await versions("/finish_weight_update", b"a", version=b"7"), await versions("/x", b"b")]
        found += [
            await versions("/finish_weight_update", b"b", version=b"0"),
            await versions("/x", b"a"),
            await versions("/x", b""),
            await versions("/x"),
        ]
        return found

    # A request without a name gets the version of the last update.
    assert asyncio.run(run()) == [b"-1,7", b"-1", b"-1,0", b"7", b"-1", b"0"]
    assert sorted(app.models.lora_requests) == ["a", "b"]


def test_adapters_are_updated_one_after_the_other(app: ProtectedApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "WAIT_S", 0.2)

    async def run() -> None:
        async def ask(path: str, name: bytes) -> int:
            return (await app.ask(path, [*AUTHORIZED, (b"x-adapter", name)], "POST"))[0]

        assert await ask("/pause", b"a") == 200
        waiting = asyncio.create_task(ask("/pause", b"b"))
        await asyncio.sleep(0.05)
        assert await ask("/resume", b"b") == 200  # for example for a run that has just begun
        assert app.reached == ["/pause"] and not waiting.done()
        assert await ask("/pause", b"a") == 200 and await ask("/resume", b"a") == 200
        assert await waiting == 200
        assert app.reached == ["/pause", "/pause", "/resume", "/pause"]
        assert await ask("/pause", b"a") == 409  # b's run was killed
        assert app.reached[3:] == ["/pause"]
        assert await ask("/resume", b"b") == 200 and await ask("/pause", b"a") == 200

    asyncio.run(run())


def test_a_run_aborts_the_requests_of_its_adapter_alone(app: ProtectedApp) -> None:
    aborted: list[Any] = []

    async def abort(names: list[str], internal: bool) -> None:
        aborted.append(names)

    app.llm.abort = abort
    states = {name: SimpleNamespace(lora_name=lora) for name, lora in (("1", "a"), ("2", "b"), ("3", None))}
    app.llm.output_processor.request_states = states
    for name in (b"a", b"b", b"c", b""):
        headers = [*AUTHORIZED, (b"x-adapter", name)]
        assert app.status_of("/abort_requests", headers, method="POST") == 200
    assert aborted == [["1"], ["2"], [], ["3"]] and app.reached == []


def test_headers_of_the_app_stay(app: ProtectedApp) -> None:
    assert asyncio.run(app.ask("/x", AUTHORIZED))[1] == {b"x-own": b"1", b"x-weight-versions": b"-1"}


def test_a_server_without_a_key_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VIME_RUN_KEY", raising=False)
    with pytest.raises(KeyError):
        RunKeyMiddleware(None)  # type: ignore[arg-type]
    monkeypatch.setenv("VIME_RUN_KEY", "")
    with pytest.raises(ValueError, match="VIME_RUN_KEY must not be empty"):
        RunKeyMiddleware(None)  # type: ignore[arg-type]
