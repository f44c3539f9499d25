"""Sends blocking HTTP requests to the servers of a run, with the run's key, and defines an engine's control routes.

Each request has a timeout, and carries the key only to a server that has proved itself (slime.peers.proof). The
module uses the standard library only, and ignores the proxies of the environment.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol
from urllib.parse import urlsplit

from slime.peers.listeners import listeners
from slime.peers.proof import require_proof

PauseMode = Literal["keep", "abort", "wait"]
SERVED_MODEL_NAME = "policy"
"""Name under which the servers of this project serve the model of their checkpoint."""
ADAPTER_HEADER = "x-adapter"
"""The header that names the adapter for a request."""
CHECKPOINT_VERSION = -1
"""The weight version of a server that still has the weights of its checkpoint."""
_LOOK_EVERY_S = 1.0


class ControlError(RuntimeError):
    """A server answered with an error. The message names the server, the request and the answer."""


def request(
    url: str,
    run_key: str,
    method: str,
    path: str,
    body: object = None,
    *,
    headers: dict[str, str] | None = None,
    timeout_s: float,
) -> tuple[http.client.HTTPResponse, bytes]:
    """Sends one request to the server at `url`, and returns the response and its body.

    Raises ControlError if the status is not 2xx. Raises NotProvenError, an OSError, if the server does not belong to
    the run; it did not get the key. Raises OSError if no answer comes within `timeout_s`, or if the server stops
    listening. A vLLM server whose engine process died stops listening and never answers its open requests.
    """
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout_s)
    sent = {"Content-Type": "application/json", **(headers or {})}
    before = listeners(connection.port)
    try:
        connection.connect()
        if run_key:
            own, peer = connection.sock.getsockname(), connection.sock.getpeername()
            require_proof(own[0], peer[0], peer[1], run_key, before, timeout_s=timeout_s)
            sent["Authorization"] = f"Bearer {run_key}"
        connection.request(method, path, None if body is None else json.dumps(body), sent)
        _await_answer(connection, timeout_s)
        response = connection.getresponse()
        content = response.read()
    finally:
        connection.close()
    if not 200 <= response.status < 300:
        text = content.decode(errors="replace")[:2000]
        route = path.partition("?")[0]  # the query may hold an engine's secret health path
        raise ControlError(f"{url} must accept {method} {route}, got HTTP {response.status}: {text}")
    return response, content


def _await_answer(connection: http.client.HTTPConnection, timeout_s: float) -> None:
    """Returns when an answer can be read. Raises OSError after `timeout_s`, or when the server stops listening."""
    end, waiting = time.monotonic() + timeout_s, select.poll()
    waiting.register(connection.sock, select.POLLIN)
    while (left_s := end - time.monotonic()) > 0:
        if waiting.poll(1000 * min(left_s, _LOOK_EVERY_S)):
            return
        # A refused connection shows that the server stopped. A timeout does not: a busy server accepts slowly.
        with (
            contextlib.suppress(TimeoutError),
            socket.create_connection((connection.host, connection.port), timeout=_LOOK_EVERY_S),
        ):
            pass
    raise TimeoutError(f"{connection.host}:{connection.port} must answer within {timeout_s:g} s, got nothing")


def answers(url: str, run_key: str, path: str, *, timeout_s: float) -> bool:
    """Returns True if GET `path` succeeds within `timeout_s`."""
    try:
        request(url, run_key, "GET", path, timeout_s=timeout_s)
    except (ControlError, OSError, http.client.HTTPException):
        return False
    return True


@dataclass(frozen=True)
class EngineLoad:
    """The load of an engine."""

    running: int
    """Number of requests that the engine computes."""
    waiting: int
    """Number of requests in the queue."""
    kv_cache: float
    """Used share of the KV cache, 0 to 1."""


class Control(Protocol):
    """The control routes of an engine server of any backend (VllmControl, SglangControl)."""

    url: str

    def pause(self, mode: PauseMode = "keep", *, drops_cache: bool = True) -> None: ...
    def resume(self) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: dict[str, object]) -> None: ...
    def finish_weight_update(self, version: int) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def sleep(self, level: int, mode: PauseMode = "keep") -> None: ...
    def wake(self, tags: Sequence[Literal["weights", "kv_cache"]] = ()) -> None: ...
    def weight_version(self) -> int: ...

    def use_prefill_engines(self, urls: Sequence[str]) -> None:
        """Gives a decode engine the addresses of the engines that compute its prompts."""
        ...

    def is_healthy(self, timeout_s: float) -> bool: ...

    def model(self) -> str:
        """Returns the folder of the checkpoint with which the server was started."""
        ...

    def load(self) -> EngineLoad | None:
        """Returns the engine's load, or None if the engine does not report it."""
        ...


MakeControl = Callable[[str, str], Control]
"""A function (URL, run's key) -> control of the server at the URL."""
