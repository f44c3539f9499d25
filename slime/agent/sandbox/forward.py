"""Forwards connections from one port inside a sandbox's network to the same port of this host's loopback."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Self

_BLOCK = 1 << 16


class Forwarder:
    """Serves a listening socket that belongs to the sandbox's network."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server

    @classmethod
    async def start(cls, listener: int, port: int) -> Self:
        self = cls(port)
        self._server = await asyncio.start_server(self._serve, sock=socket.socket(fileno=listener))
        return self

    def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
            finally:
                far_writer.close()
        except (OSError, asyncio.CancelledError):
            # The other side is gone, or the sandbox: the connection ends with it.
            pass
        finally:
            self._tasks.discard(task)
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(_BLOCK):
            writer.write(data)
            await writer.drain()
    finally:
        with contextlib.suppress(OSError):
            if writer.can_write_eof():
                writer.write_eof()
