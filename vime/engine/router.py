"""vllm-router as a supervised subprocess: the one address that rollouts talk to.

Owns its command line and its list of workers. Every route of it needs the run's key (see router_main).
"""

from __future__ import annotations

import http.client
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote, urlsplit

import vime
from vime.engine.middleware import KEY_VARIABLE, health_prefix
from vime.engine.process import SupervisedProcess, free_port, require_free_port, wait_ready

_START_S = 60.0
_ADD_S = 120.0


@dataclass(frozen=True)
class RouterSpec:
    """What the router is to be. `port` 0: a free one. `argv`: flags of vllm-router; they win over the defaults here."""

    run_key: str = field(repr=False)
    log_path: str
    host: str = "127.0.0.1"
    port: int = 0
    argv: tuple[str, ...] = ()
    request_timeout_s: float = 600.0

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def command(spec: RouterSpec) -> list[str]:
    """The command line of the router; holds no secret."""
    flags = {
        "host": spec.host,
        "port": spec.port,
        "policy": "round_robin",
        "request-timeout-secs": max(1, round(spec.request_timeout_s)),
        "worker-startup-timeout-secs": round(_ADD_S),
        "worker-startup-check-interval": 1,
        "cors-allowed-origins": "http://none.invalid",  # no web page may ask; the default is that all may
    }
    argv = [sys.executable, "-m", "vime.engine.router_main"]
    for name, value in flags.items():
        argv += [f"--{name}", str(value)]
    # Retries are the client's, which knows the deadline.
    return [*argv, "--disable-retries", *spec.argv]


class Router:
    """Starts and watches one router; adds and removes engines. `start`, `wait_ready`, then the rest."""

    def __init__(self, spec: RouterSpec) -> None:
        self.spec = spec
        self._process: SupervisedProcess | None = None

    def start(self) -> str:
        """Start without workers and return the URL, which a second start keeps. ValueError when the port is taken."""
        if self.spec.port == 0:
            self.spec = replace(self.spec, port=free_port(self.spec.host))
        require_free_port(self.spec.host, self.spec.port, "the router")
        root = str(Path(vime.__file__).parents[1])
        env: Mapping[str, str] = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
            KEY_VARIABLE: self.spec.run_key,
        }
        self._process = SupervisedProcess(command(self.spec), env, self.spec.log_path)
        return self.spec.url

    def wait_ready(self) -> None:
        """Return once it answers with the key. RuntimeError with the last log lines when it never does."""
        what = f"the router at {self.spec.host}:{self.spec.port}"
        wait_ready(self._started(), self._answers, what, _START_S, "a start-up time of")

    def add(self, engine_url: str) -> None:
        """Route to a healthy engine from now on. RuntimeError when the router refuses."""
        self._request("POST", f"/add_worker?url={quote(self._worker(engine_url), safe='')}", _ADD_S)

    def remove(self, engine_url: str) -> None:
        """Route to this engine no more; one that is not there is fine."""
        self._request("POST", f"/remove_worker?url={quote(self._worker(engine_url), safe='')}", _ADD_S)

    def engines(self) -> list[str]:
        """URLs of the engines it routes to."""
        prefix = health_prefix(self.spec.run_key)
        workers = json.loads(self._request("GET", "/workers", _START_S))["workers"]
        return [worker["url"].removesuffix(prefix) for worker in workers]

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        return self._started().poll()

    def tail_log(self) -> str:
        """The last lines of its log."""
        return self._started().tail_log()

    def stop(self) -> None:
        """End it; nothing to do when it was never started."""
        if self._process is not None:
            self._process.stop()

    def _worker(self, engine_url: str) -> str:
        return engine_url + health_prefix(self.spec.run_key)

    def _started(self) -> SupervisedProcess:
        assert self._process is not None, "start() comes first"
        return self._process

    def _answers(self) -> bool:
        try:
            self._request("GET", "/workers", 5)
        except (OSError, RuntimeError, http.client.HTTPException):
            return False
        return True

    def _request(self, method: str, path: str, timeout_s: float) -> bytes:
        address = urlsplit(self.spec.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout_s)
        try:
            connection.request(method, path, headers={"Authorization": f"Bearer {self.spec.run_key}"})
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        if response.status != 200:
            said = content.decode(errors="replace")[:1000]
            raise RuntimeError(
                f"the router must accept {method} {path.split('?')[0]}, got HTTP {response.status}: {said}"
            )
        return content
