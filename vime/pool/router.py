"""vllm-router as a supervised subprocess: the one address that rollouts talk to.

Owns its command line and its list of workers. Every route of it needs the run's key (see router_main).
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from vime.pool.control import request
from vime.pool.process import Server, ServerSpec
from vime.vllm.worker.middleware import health_prefix

REQUEST_S = 120.0
NEVER = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class RouterSpec(ServerSpec):
    """What the router is to be. `argv`: flags of vllm-router; they win over the defaults here."""

    argv: tuple[str, ...] = ()
    door_port: int = 0
    """Where the door for plug-ins listens, see vime.sglang_api.gateway. 0: a free port is picked at once."""
    door_host: str = "127.0.0.1"
    apart: bool = False
    """Whether somebody else started the router at `host` and `port`. Then only the door is the run's own."""
    request_timeout_s: float = 600.0

    @property
    def door_url(self) -> str:
        return f"http://{self.door_host}:{self.door_port}"


class Router(Server[RouterSpec]):
    """One router: a server that engines are added to and removed from once it serves."""

    name = "the router"
    ready_path = "/workers"
    timeout_flag = "a start-up time of"

    def __init__(self, spec: RouterSpec) -> None:
        """Its address is known from now on. It keeps the port while this object lives, and starts there again."""
        super().__init__(spec)
        self.choose_port()
        self.spec = replace(self.spec, door_port=spec.door_port or self._hold(spec.door_host))

    def command(self) -> list[str]:
        spec = self.spec
        flags = {
            "host": spec.host,
            "port": spec.port,
            "door-port": spec.door_port,
            "policy": "round_robin",
            "request-timeout-secs": max(1, round(spec.request_timeout_s)),
            "worker-startup-timeout-secs": round(REQUEST_S),
            "worker-startup-check-interval": 1,
            "cors-allowed-origins": "http://none.invalid",  # no web page may ask; the default is that all may
            # Ten requests past their deadline would shut an engine out for a minute, be it the only one.
            # Which engines are fit to serve is the pool's to judge.
            "cb-failure-threshold": NEVER,
        }
        argv = [sys.executable, "-m", "vime.pool.router_main"]
        for name, value in flags.items():
            argv += [f"--{name}", str(value)]
        # Retries are the client's, which knows the deadline.
        return [*argv, "--disable-retries", *spec.argv]

    def add(self, engine_url: str) -> None:
        """Route to a healthy engine from now on. RuntimeError when the router refuses."""
        self._request("POST", f"/add_worker?url={quote(self._worker(engine_url), safe='')}")

    def remove(self, engine_url: str) -> None:
        """Route to this engine no more; one that is not there is fine."""
        self._request("POST", f"/remove_worker?url={quote(self._worker(engine_url), safe='')}")

    def engines(self) -> list[str]:
        """URLs of the engines it routes to."""
        prefix = health_prefix(self.spec.run_key)
        workers = json.loads(self._request("GET", "/workers"))["workers"]
        return [worker["url"].removesuffix(prefix) for worker in workers]

    def _worker(self, engine_url: str) -> str:
        return engine_url + health_prefix(self.spec.run_key)

    def _request(self, method: str, path: str, body: Any = None) -> bytes:
        return request(self.spec.url, self.spec.run_key, method, path, body, timeout_s=REQUEST_S)[1]
