"""Listens for the connections of agents, and bounds their number and the time that they may stay without a key.

With --session-host, other machines reach the address, and everyone there can open connections. A connection that has
sent no request with the key of an open session after UNKNOWN_S is closed. At the limit of connections, the oldest of
these is closed for a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from ipaddress import ip_address

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from slime.peers.http import get_host_info
from slime.records.errors import FlagError

LOOPBACK = "127.0.0.1"
AUTO = "auto"
CONNECTIONS = 4096
"""Least number of connections at which new connections displace others. A client opens one per running request."""
PER_SESSION = 4
"""Number of connections per open session, if these are more than CONNECTIONS."""
UNKNOWN_S = 60.0
_BACKLOG = 1024


class _Closed(asyncio.Protocol):
    """A connection that is closed at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class SessionListener:
    """The listening socket of `server`, and its connections. `sessions` returns the number of open sessions."""

    def __init__(self, server: web.Server, sessions: Callable[[], int]) -> None:
        self._server, self._sessions = server, sessions
        self._known: set[RequestHandler] = set()
        self._socket: asyncio.Server | None = None

    async def start(self, host: str) -> str:
        """Listens on `host`, and returns the address for clients. Raises ValueError if this machine does not have the
        address."""
        own = get_host_info()[1]
        try:
            self._socket = await asyncio.get_running_loop().create_server(
                self._connected, own if host == AUTO else host, 0, backlog=_BACKLOG
            )
        except OSError as error:
            raise FlagError(
                "--session-host",
                "be an address of the rollout manager's host",
                f"{host!r}: {error}",
                f"{AUTO} takes the address of the interface that leads out",
            ) from error
        bound, port = self._socket.sockets[0].getsockname()[:2]
        shown = ip_address(own if ip_address(bound).is_unspecified else bound)
        return f"http://[{shown}]:{port}" if shown.version == 6 else f"http://{shown}:{port}"

    def stop(self) -> None:
        """Takes no more connections."""
        if self._socket is not None:
            self._socket.close()

    def trust(self, request: web.Request) -> None:
        """Records that a request of this connection had the key of an open session."""
        self._known.add(request.protocol)

    def _connected(self) -> asyncio.Protocol:
        connections = self._server.connections
        if len(self._known) > len(connections) + CONNECTIONS:
            self._known.intersection_update(connections)
        if len(connections) >= max(CONNECTIONS, PER_SESSION * self._sessions()):
            self._known.intersection_update(connections)
            unknown = next((each for each in connections if each not in self._known), None)
            if unknown is None:
                return _Closed()
            unknown.force_close()
        connection = self._server()
        asyncio.get_running_loop().call_later(UNKNOWN_S, self._close_unknown, connection)
        return connection

    def _close_unknown(self, connection: RequestHandler) -> None:
        if connection.transport is None:
            self._known.discard(connection)
        elif connection not in self._known:
            connection.force_close()
