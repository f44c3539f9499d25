"""Makes connections of aiohttp's clients over which a run's key may be sent, because their server has proved itself
first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

import aiohttp

from slime.peers.listeners import Listener, listeners
from slime.peers.proof import require_proof

if TYPE_CHECKING:
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.client_reqrep import ClientRequest
    from aiohttp.tracing import Trace


@dataclass(frozen=True)
class RunKey:
    """The key that a request carries. `held`: see `slime.peers.proof.require_proof`."""

    value: str = field(repr=False)
    held: bool = False


class ProvenConnector(aiohttp.TCPConnector):
    """A connector that checks servers. `key_of` returns the key that a request carries, or None. A request with a key
    raises aiohttp.ClientOSError before anything is sent, unless the server has proved itself."""

    def __init__(
        self,
        key_of: Callable[[ClientRequest], RunKey | None],
        *,
        limit: int = 100,
        keepalive_timeout: float = 15,
    ) -> None:
        super().__init__(limit=limit, keepalive_timeout=keepalive_timeout)
        self._key_of = key_of
        self._before: WeakKeyDictionary[ResponseHandler, list[Listener]] = WeakKeyDictionary()
        self._proven: WeakSet[ResponseHandler] = WeakSet()

    async def _create_connection(
        self, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        """Opens a new connection, and stores the sockets that listened at its port before."""
        before = listeners(req.url.port or 0)
        protocol = await super()._create_connection(req, traces, timeout)
        self._before[protocol] = before
        return protocol

    async def connect(
        self, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> aiohttp.connector.Connection:
        key = self._key_of(req)
        connection = await super().connect(req, traces, timeout)
        protocol, transport = connection.protocol, connection.transport
        if key is None or protocol is None or transport is None or protocol in self._proven:
            return connection
        own, peer = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
        try:
            if own is None or peer is None:
                raise aiohttp.ServerDisconnectedError
            await asyncio.to_thread(
                require_proof, own[0], peer[0], peer[1], key.value, self._before[protocol], held=key.held
            )
        except BaseException:
            connection.close()
            raise
        self._proven.add(protocol)
        return connection
