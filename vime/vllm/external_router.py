"""Uses a vllm-router that runs outside the run. The run adds and removes its engines at this router, and starts its own
process for plug-ins (vime.sglang_api.gateway) in front of the router."""

from __future__ import annotations

import contextlib
import http.client
import sys

from slime.peers.proof import is_strangers
from vime.pool.control import answers
from vime.pool.process import SupervisedProcess, accepts
from vime.vllm.router import VllmRouter


class ExternalRouter(VllmRouter):
    """Supervises the gateway process of an external router. If the router ends, `start` and `wait_ready` wait for a new
    router."""

    name = "the external router, or its gateway,"

    def command(self) -> list[str]:
        spec = self.spec
        return [
            sys.executable,
            "-m",
            "vime.sglang_api.gateway",
            spec.gateway_host,
            str(spec.gateway_port),
            spec.url,
            spec.adapter,
            spec.checkpoint,
        ]

    def start(self) -> str:
        self._take_port(self.spec.gateway_host, self.spec.gateway_port, "the gateway to the router")
        self._process = SupervisedProcess(self.command(), self.environment(), self.spec.log_path)
        return self.spec.url

    def is_ready(self) -> bool:
        """Returns True if the router answers through the gateway."""
        return answers(self.spec.gateway_url, self.spec.run_key, self.ready_path, timeout_s=5)

    def poll(self) -> int | None:
        """Returns None while the gateway runs and the router listens, as far as this host can detect."""
        if (status := super().poll()) is not None:
            return status
        host, port = self.spec.host, self.spec.port
        return None if accepts(host, port) and not is_strangers(host, port, self.spec.run_key) else 1

    def remove_all(self) -> None:
        """Removes every engine, because the router outlives this run."""
        with contextlib.suppress(RuntimeError, OSError, http.client.HTTPException):
            for url in self.engines():
                self.remove(url)

    def stop(self) -> None:
        self.remove_all()
        super().stop()
