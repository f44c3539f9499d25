"""sglang-router as a supervised subprocess. Its command line and the way to add engines differ from vllm-router.

The router adds and removes engines in the background, so `add` and `remove` wait until its list shows the change.
Plug-ins use the router without a gateway, because it forwards SGLang's /generate.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypedDict
from urllib.parse import urlsplit

from vime.pool.asgi import LARGEST_BODY_BYTES, health_prefix
from vime.pool.control import answers
from vime.pool.process import Server
from vime.pool.router import NEVER, REQUEST_S, RouterServer, RouterSpec

_POLL_S = 0.1


class _RouterWorker(TypedDict):
    """An entry of sglang-router's list."""

    id: str
    url: str
    is_healthy: bool


class SglangRouter(RouterServer):
    """Runs one sglang-router. The router's address is also the gateway's address."""

    name = "sglang-router"

    def __init__(self, spec: RouterSpec) -> None:
        Server.__init__(self, replace(spec, port=spec.port or spec.gateway_port))
        self.choose_port()
        self.spec = replace(self.spec, gateway_host=self.spec.host, gateway_port=self.spec.port)

    def command(self) -> list[str]:
        spec = self.spec
        flags = {
            "host": spec.host,
            "port": spec.port,
            "max-payload-size": LARGEST_BODY_BYTES,
            "policy": "round_robin",
            "request-timeout-secs": max(1, round(spec.request_timeout_s)),
            "worker-startup-timeout-secs": round(REQUEST_S),
            "worker-startup-check-interval": 1,
            "cors-allowed-origins": "http://none.invalid",
            "cb-failure-threshold": NEVER,
            "log-level": "warn",  # each request is a line otherwise
        }
        argv = [sys.executable, "-m", "vime.sglang.router_main"]
        for name, value in flags.items():
            argv += [f"--{name}", str(value)]
        return [*argv, "--disable-retries", *spec.argv]

    def add(self, engine_url: str) -> None:
        """Adds an engine to the router, and waits until the router lists it as healthy. Raises RuntimeError after
        REQUEST_S seconds."""
        url = self._worker(engine_url)
        self._request("POST", "/workers", {"url": url, "api_key": self.spec.run_key})
        self._wait(
            lambda: any(worker["is_healthy"] for worker in self._workers_at(engine_url)),
            f"add the engine {engine_url}",
        )

    def remove(self, engine_url: str) -> None:
        for worker in self._workers_at(engine_url):
            self._request("DELETE", f"/workers/{worker['id']}")
        self._wait(lambda: not self._workers_at(engine_url), f"remove the engine {engine_url}")

    def engines(self) -> list[str]:
        return [_origin(worker["url"]) for worker in self._workers()]

    def _worker(self, engine_url: str) -> str:
        """Returns the URL that the router gets for an engine. The router requests /health without a key. SGLang's
        servers answer this request. vLLM servers of `vime serve engine` answer it under a secret path only, so their
        URL includes that path."""
        prefix = health_prefix(self.spec.run_key)
        return engine_url + (prefix if answers(engine_url, "", f"{prefix}/health", timeout_s=5) else "")

    def _workers(self) -> list[_RouterWorker]:
        workers: list[_RouterWorker] = json.loads(self._request("GET", "/workers"))["workers"]
        return workers

    def _workers_at(self, engine_url: str) -> list[_RouterWorker]:
        return [worker for worker in self._workers() if _origin(worker["url"]) == engine_url]

    def _wait(self, holds: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + REQUEST_S
        while not holds():
            if time.monotonic() >= end:
                raise RuntimeError(
                    f"{self.name} must {what} within {REQUEST_S:g} s, got no change of its list; see "
                    f"{self.spec.log_path}"
                )
            time.sleep(_POLL_S)


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"
