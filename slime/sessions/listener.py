"""Listens for agents' connections, and limits the number of connections and the time that a connection has without a
key.

With --session-host, other machines can reach the address, and anyone there can open connections. The listener closes a
connection that sends no request with the key of an open session within UNKNOWN_S seconds. At the limit of connections,
the listener closes the oldest connection without such a request for each new connection.
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
"""The limit on connections for few open sessions. A client opens one connection per running request."""
PER_SESSION = 4
"""The limit on connections per open session, if the product with the number of sessions is above CONNECTIONS."""
UNKNOWN_S = 60.0
_BACKLOG = 1024


class _Closed(asyncio.Protocol):
    """Closes its connection as soon as it is made."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class SessionListener:
    """Owns the listening socket of `server` and its connections. `sessions` returns the number of open sessions."""

    def __init__(self, server: web.Server, sessions: Callable[[], int]) -> None:
        self._server, self._sessions = server, sessions
        self._known: set[RequestHandler] = set()
        self._socket: asyncio.Server | None = None

    async def start(self, host: str) -> str:
        """Listens on `host`, and returns the URL for clients. Raises ValueError if this machine does not have the
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
        """Accepts no further connections."""
        if self._socket is not None:
            self._socket.close()

    def trust(self, request: web.Request) -> None:
        """Records that the connection of this request is trusted, because a request had the key of an open session."""
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
