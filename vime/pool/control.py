"""HTTP client of the engine servers: blocking requests with the run's key, and the control routes of one engine.

Each request has a timeout. The module uses the standard library only, and ignores the proxies of the environment. vLLM
serves the control routes only with VLLM_SERVER_DEV_MODE=1 in its environment.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import socket
import time
from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import urlencode, urlsplit

from vime.vllm.versions import finish_body
from vime.vllm.worker.middleware import NEW_VERSION_HEADER, VERSIONS_HEADER

PauseMode = Literal["keep", "abort", "wait"]
_QUICK_S = 30.0
_SLOW_S = 600.0
_LOOK_EVERY_S = 1.0


class ControlError(RuntimeError):
    """A server answered with an error. The message names the server, the request and the answer."""


def request(
    url: str,
    run_key: str,
    method: str,
    path: str,
    body: Any = None,
    *,
    headers: dict[str, str] | None = None,
    timeout_s: float,
) -> tuple[http.client.HTTPResponse, bytes]:
    """Send one request to the server at `url`. Return the response and its body.

    ControlError when the status is not 2xx. OSError when no answer comes within `timeout_s`, or when the server stops
    listening: a vLLM server whose engine process died stops listening, and never answers the requests that it has.
    """
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout_s)
    sent = {"Authorization": f"Bearer {run_key}", "Content-Type": "application/json", **(headers or {})}
    try:
        connection.request(method, path, None if body is None else json.dumps(body), sent)
        _await_answer(connection, timeout_s)
        response = connection.getresponse()
        content = response.read()
    finally:
        connection.close()
    if not 200 <= response.status < 300:
        said = content.decode(errors="replace")[:2000]
        route = path.partition("?")[0]  # the query may hold an engine's secret health path
        raise ControlError(f"{url} must accept {method} {route}, got HTTP {response.status}: {said}")
    return response, content


def _await_answer(connection: http.client.HTTPConnection, timeout_s: float) -> None:
    """Return when an answer can be read. OSError after `timeout_s`, or when the server stops listening."""
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
    """Whether GET `path` answers 200 within `timeout_s`."""
    try:
        request(url, run_key, "GET", path, timeout_s=timeout_s)
    except (ControlError, OSError, http.client.HTTPException):
        return False
    return True


class EngineControl:
    """Control client of the engine at `url`, e.g. "http://127.0.0.1:8000". Thread-safe: one connection per call.

    Every method but `is_healthy` raises ControlError when the engine answers with an error, and OSError when the engine
    does not answer in time.
    """

    def __init__(self, url: str, run_key: str) -> None:
        self.url = url
        self._run_key = run_key

    def pause(self, mode: PauseMode = "keep") -> None:
        """Stop generating. `mode` says what happens to running requests: they are frozen until `resume` (keep), ended
        with the tokens that they have (abort), or finished first (wait)."""
        self._post("/pause", query={"mode": mode}, timeout_s=_SLOW_S)

    def resume(self) -> None:
        self._post("/resume")

    def start_weight_update(self) -> None:
        self._post("/start_weight_update", timeout_s=_SLOW_S)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._post("/update_weights", {"update_info": update_info}, timeout_s=_SLOW_S)

    def finish_weight_update(self, version: int) -> None:
        """End the update and make `version` the live version. Later answers carry `version`."""
        headers = {NEW_VERSION_HEADER: str(version)}
        self._post("/finish_weight_update", finish_body(version), headers=headers, timeout_s=_SLOW_S)

    def reset_prefix_cache(self) -> None:
        """Drop all cached keys and values. Running requests compute theirs again when they continue."""
        answer = self._post(
            "/reset_prefix_cache", query={"reset_running_requests": "true"}, timeout_s=_SLOW_S
        )
        if not json.loads(answer)["success"]:
            raise ControlError(f"engine {self.url} must drop its prefix cache, got {answer.decode()}")

    def sleep(self, level: int, mode: PauseMode = "keep") -> None:
        """Free device memory with vLLM's sleep mode. Keys and values are dropped. Level 1 moves the weights to host
        memory, and level 2 drops the weights."""
        self._post("/sleep", query={"level": str(level), "mode": mode}, timeout_s=_SLOW_S)

    def wake(self, tags: Sequence[Literal["weights", "kv_cache"]] = ()) -> None:
        """Allocate device memory again, for the parts in `tags` or for all parts. After level 2 the weights are
        undefined until an update loads them."""
        self._post("/wake_up", query=[("tags", tag) for tag in tags], timeout_s=_SLOW_S)

    def weight_version(self) -> int:
        """Version of the live weights; -1 means the weights of the checkpoint."""
        response, _ = request(self.url, self._run_key, "GET", "/health", timeout_s=_QUICK_S)
        return int(response.headers[VERSIONS_HEADER].split(",")[-1])

    def is_healthy(self, timeout_s: float) -> bool:
        """Whether /health answers 200 within `timeout_s`."""
        return answers(self.url, self._run_key, "/health", timeout_s=timeout_s)

    def _post(
        self,
        path: str,
        body: Any = None,
        *,
        query: dict[str, str] | Sequence[tuple[str, str]] | None = None,
        headers: dict[str, str] | None = None,
        timeout_s: float = _QUICK_S,
    ) -> bytes:
        path = f"{path}?{urlencode(query)}" if query else path
        return request(self.url, self._run_key, "POST", path, body, headers=headers, timeout_s=timeout_s)[1]
