"""Runs the router of a run as a supervised subprocess. Rollouts send all requests to its address.

The backends' routers differ in their command lines and in the routes that add and remove engines. Every route needs
the run's key.
"""

from __future__ import annotations

from dataclasses import dataclass

from vime.pool.control import request
from vime.pool.process import Server, ServerSpec

REQUEST_S = 120.0
NEVER = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class RouterSpec(ServerSpec):
    """The settings of a router. `argv` are flags of the backend's router; they override the defaults of its class."""

    argv: tuple[str, ...] = ()
    gateway_port: int = 0
    """Port of the gateway for plug-ins, see vime.sglang_api.gateway. With 0, the run reserves a free port at once."""
    gateway_host: str = "127.0.0.1"
    external: bool = False
    """True if the router at `host` and `port` was started outside the run. Then the run starts only the gateway."""
    request_timeout_s: float = 600.0
    adapter: str = ""
    """The adapter that serves requests of plug-ins."""
    checkpoint: str = ""
    """The engines' checkpoint, which requests of plug-ins may name as their model."""

    @property
    def gateway_url(self) -> str:
        return f"http://{self.gateway_host}:{self.gateway_port}"


class RouterServer(Server[RouterSpec]):
    """A router server. Engines can be added and removed once it serves."""

    name = "the router"
    ready_path = "/workers"
    timeout_flag = "a start-up time of"

    def add(self, engine_url: str) -> None:
        """Adds a healthy engine to the router. Raises RuntimeError if the router refuses."""
        raise NotImplementedError

    def remove(self, engine_url: str) -> None:
        """Removes an engine from the router. It does nothing for an engine that the router does not have."""
        raise NotImplementedError

    def engines(self) -> list[str]:
        """Returns the URLs of the router's engines."""
        raise NotImplementedError

    def _request(self, method: str, path: str, body: object = None) -> bytes:
        return request(self.spec.url, self.spec.run_key, method, path, body, timeout_s=REQUEST_S)[1]
