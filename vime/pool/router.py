"""The router of a run as a supervised subprocess: the one address that rollouts talk to.

A backend's router has its own command line, and its own routes to add and remove engines. Every route needs the run's
key.
"""

from __future__ import annotations

from dataclasses import dataclass

from vime.pool.control import request
from vime.pool.process import Server, ServerSpec

REQUEST_S = 120.0
NEVER = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class RouterSpec(ServerSpec):
    """What the router is to be. `argv`: flags of the backend's router; they win over the defaults of its class."""

    argv: tuple[str, ...] = ()
    gateway_port: int = 0
    """Where the gateway for plug-ins listens, see vime.sglang_api.gateway. 0: a free port is picked at once."""
    gateway_host: str = "127.0.0.1"
    external: bool = False
    """Whether somebody else started the router at `host` and `port`. Then only the gateway is the run's own."""
    request_timeout_s: float = 600.0
    adapter: str = ""
    """The adapter that requests of plug-ins are for."""

    @property
    def gateway_url(self) -> str:
        return f"http://{self.gateway_host}:{self.gateway_port}"


class RouterServer(Server[RouterSpec]):
    """One router: a server that engines are added to and removed from once it serves."""

    name = "the router"
    ready_path = "/workers"
    timeout_flag = "a start-up time of"

    def add(self, engine_url: str) -> None:
        """Route to a healthy engine from now on. RuntimeError when the router refuses."""
        raise NotImplementedError

    def remove(self, engine_url: str) -> None:
        """Route to this engine no more; one that is not there is fine."""
        raise NotImplementedError

    def engines(self) -> list[str]:
        """URLs of the engines it routes to."""
        raise NotImplementedError

    def _request(self, method: str, path: str, body: object = None) -> bytes:
        return request(self.spec.url, self.spec.run_key, method, path, body, timeout_s=REQUEST_S)[1]
