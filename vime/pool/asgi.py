"""Checks each request to an engine server before the server reads it: the run's key, and the size of the body.

The module also answers refused requests, and proves to clients that this server has the key. The types are those of
ASGI, with which a server calls the middleware: https://asgi.readthedocs.io/en/latest/specs/main.html.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from slime.config.child_environment import NO_KEY, RUN_KEY
from slime.peers.proof import proof

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

KEY_VARIABLE = RUN_KEY
"""The environment variable that passes the key. It is never on a command line."""
LARGEST_BODY_BYTES = 128 << 20
"""The largest body that engines, routers and the gateway accept: a prompt of 10 million token ids, or 90 MiB of images.
"""
_TOO_LARGE = f"a body must have at most {LARGEST_BODY_BYTES} bytes, got more; send less in one request"


def health_prefix(run_key: str) -> str:
    """Returns the path for /health without a key: "/" + the first 32 hex digits of HMAC-SHA256(key, "health")."""
    return "/" + hmac.new(run_key.encode(), b"health", hashlib.sha256).hexdigest()[:32]


class TooLargeError(Exception):
    """The body of a request exceeds LARGEST_BODY_BYTES."""


def has_key(headers: list[tuple[bytes, bytes]], run_key: str) -> bool:
    """Returns True if an ASGI header list holds `Authorization: Bearer <run_key>`, compared in constant time.

    sglang-router sends the key of its worker and the key of its caller; every such header must be right.
    """
    sent = [value for name, value in headers if name == b"authorization"]
    right = [hmac.compare_digest(each, b"Bearer " + run_key.encode()) for each in sent]
    return bool(right) and all(right)


async def prove(scope: Scope, send: Send, run_key: str) -> None:
    """Answers a challenge, see `slime.peers.proof`."""
    challenge = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("challenge", [""])[0]
    host, port = scope["server"]
    try:
        response = proof(run_key, challenge, host, port).encode()
    except ValueError as error:
        await answer(send, 400, error=str(error))
        return
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(response)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": response})


async def bounded(scope: Scope, receive: Receive, send: Send, serve: App) -> None:
    """Passes a request to `serve`. It answers 413 for a body of more than LARGEST_BODY_BYTES, and 400 for a body that
    is nested too deep for Python's parsers."""
    taken, started = 0, False
    length = dict(scope["headers"]).get(b"content-length", b"0")
    if length.isdigit() and int(length) > LARGEST_BODY_BYTES:
        await answer(send, 413, error=_TOO_LARGE)
        return

    async def counted() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > LARGEST_BODY_BYTES:
            raise TooLargeError
        return message

    async def noted(message: Message) -> None:
        nonlocal started
        started = True
        await send(message)

    try:
        await serve(scope, counted, noted)
    except (TooLargeError, RecursionError) as error:
        if started:
            raise
        if isinstance(error, TooLargeError):
            await answer(send, 413, error=_TOO_LARGE)
        else:
            await answer(
                send, 400, error="a body must not be nested so deep, got one that is; send flatter JSON"
            )


async def answer(send: Send, status: int, **content: str) -> None:
    """Sends `content` as JSON."""
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def refuse(scope: Scope, send: Send) -> None:
    """Answers a request without the key with 401, or closes its websocket with 1008."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    await answer(send, 401, error=NO_KEY)
