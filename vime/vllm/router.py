"""Runs vllm-router as a supervised subprocess: builds its command line and changes its list of workers. router_main
guards it with the run's key."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from urllib.parse import quote

from vime.pool.asgi import LARGEST_BODY_BYTES, health_prefix
from vime.pool.router import NEVER, REQUEST_S, RouterServer, RouterSpec


class VllmRouter(RouterServer):
    """One vllm-router."""

    def __init__(self, spec: RouterSpec) -> None:
        """Chooses the router's address. This object holds the port while it exists, so a restarted router uses the same
        port."""
        super().__init__(spec)
        self.choose_port()
        self.spec = replace(self.spec, gateway_port=spec.gateway_port or self._hold(spec.gateway_host))

    def start(self) -> str:
        self._take_port(self.spec.gateway_host, self.spec.gateway_port, "the gateway to the router")
        return super().start()

    def command(self) -> list[str]:
        spec = self.spec
        flags = {
            "host": spec.host,
            "port": spec.port,
            "gateway-host": spec.gateway_host,
            "gateway-port": spec.gateway_port,
            "max-payload-size": LARGEST_BODY_BYTES,
            "policy": "round_robin",
            "request-timeout-secs": max(1, round(spec.request_timeout_s)),
            "worker-startup-timeout-secs": round(REQUEST_S),
            "worker-startup-check-interval": 1,
            # no web page may send requests; by default all web pages may
            "cors-allowed-origins": "http://none.invalid",
            # By default, ten requests past their deadline remove an engine for a minute, even if it is the only engine.
            # The pool decides which engines are fit to serve.
            "cb-failure-threshold": NEVER,
        }
        argv = [sys.executable, "-m", "vime.vllm.router_main"]
        for name, value in flags.items():
            argv += [f"--{name}", str(value)]
        argv += ["--adapter", spec.adapter] if spec.adapter else []
        argv += ["--checkpoint", spec.checkpoint] if spec.checkpoint else []
        # The client retries, because it has the deadline.
        return [*argv, "--disable-retries", *spec.argv]

    def add(self, engine_url: str) -> None:
        self._request("POST", f"/add_worker?url={quote(self._worker(engine_url), safe='')}")

    def remove(self, engine_url: str) -> None:
        self._request("POST", f"/remove_worker?url={quote(self._worker(engine_url), safe='')}")

    def engines(self) -> list[str]:
        prefix = health_prefix(self.spec.run_key)
        workers = json.loads(self._request("GET", "/workers"))["workers"]
        return [worker["url"].removesuffix(prefix) for worker in workers]

    def _worker(self, engine_url: str) -> str:
        return engine_url + health_prefix(self.spec.run_key)
