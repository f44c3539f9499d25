"""Sends requests to a sandbox's owner process (`slime.agent.init`) through a socket, and receives the replies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

from slime.agent.sandbox.protocol import SandboxError

Message = dict[str, Any]
_LARGEST_PIPE = 1 << 20
_STARTED = "start"
_FIELDS: dict[str, dict[str, type]] = {
    _STARTED: {"ready": str, "landlock": bool},
    "exec": {"code": int, "reason": str},
    "listen": {},
}
"""Operation -> fields and types of its answer, unless the operation failed. The first message answers the start."""


class SandboxChannel:
    """Requests and replies in one event loop. When the owner process ends, open requests raise SandboxError."""

    def __init__(self, ours: socket.socket) -> None:
        ours.setblocking(False)
        self._socket = ours
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[str, asyncio.Future[Message]]] = {}
        self.first: asyncio.Future[Message] = self._loop.create_future()
        """The owner's first message, sent when it is ready."""
        self.closed = False
        self._loop.add_reader(ours.fileno(), self._read)

    def ask(
        self, operation: str, descriptors: Sequence[int] = (), **fields: object
    ) -> tuple[int, asyncio.Future[Message]]:
        """Sends a request. Returns its number, and the future of its reply."""
        number = next(self._numbers)
        reply = self._loop.create_future()
        self._open[number] = operation, reply
        self._send({"op": operation, "id": number, **fields}, descriptors)
        return number, reply

    def kill(self, number: int, reason: str) -> None:
        self._send({"op": "kill", "id": number, "reason": reason}, ())

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            error = SandboxError(
                "the sandbox's own process has ended; see its limits, or start another sandbox"
            )
            for future in [self.first, *(reply for _, reply in self._open.values())]:
                if not future.done():
                    future.set_exception(error)
                    # Reading the exception avoids asyncio's warning if no task waits for the future.
                    future.exception()
            self._open.clear()

    def _send(self, message: Message, descriptors: Sequence[int]) -> None:
        if self.closed:
            raise SandboxError(
                "the sandbox must run before it is used, got a closed one; use `async with`, or call start()"
            )
        body = os.memfd_create("request")
        try:
            with os.fdopen(os.dup(body), "wb") as file:
                file.write(json.dumps(message).encode())
            socket.send_fds(self._socket, [b"x"], [body, *descriptors])
        except OSError as error:
            self.close()
            raise SandboxError(
                f"the sandbox's own process has ended ({error}); start another sandbox"
            ) from error
        finally:
            os.close(body)

    def _read(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 16, 1)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        if not data:
            self.close()
            return
        try:
            message, future = self._answer(data, len(descriptors))
        except (ValueError, RecursionError):  # the owner writes no such message, so another process did
            message, future = {}, None
            self.close()
        if future is None or future.done():
            for descriptor in descriptors:
                os.close(descriptor)
        else:
            future.set_result({**message, "descriptors": descriptors})

    def _answer(self, data: bytes, descriptors: int) -> tuple[Message, asyncio.Future[Message] | None]:
        """Parses a message. Returns it with the future that waits for it, None if no request waits. The request is no
        longer open. Raises ValueError for a message of another form."""
        message: Message = json.loads(data)
        if type(message) is not dict or type(message.get("id", 0)) is not int:
            raise ValueError(
                f"a message must be an object with a number, got {data[:80]!r}; start another sandbox"
            )
        operation, future = _STARTED, self.first
        if "id" in message:
            if message["id"] not in self._open:
                return message, None
            operation, future = self._open[message["id"]]
        failed = "failed" in message
        wanted: dict[str, type] = {"failed": str} if failed else _FIELDS[operation]
        wrong = any(type(message.get(name)) is not kind for name, kind in wanted.items())
        if wrong or (operation == "listen" and not failed and not descriptors):
            raise ValueError(
                f"an answer to {operation} must have {[*wanted]}, got {data[:80]!r}; start another sandbox"
            )
        self._open.pop(message.get("id", 0), None)
        return message, future


class CommandOutput:
    """Collects stdout and stderr of a command. It keeps the first `limit` bytes of the two streams together, drops the
    rest without blocking the command, and sets the event `full`."""

    def __init__(self, limit: int) -> None:
        self.left, self.truncated = limit, False
        self.full: asyncio.Event = asyncio.Event()

    async def pipe(self) -> tuple[int, OutputStream]:
        """Makes a pipe. Returns the descriptor for writing, which the caller closes, and the stream that collects the
        data."""
        reader, writer = os.pipe()
        stream = OutputStream(self)
        stream.transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: stream, os.fdopen(reader, "rb")
        )
        return writer, stream

    def take(self, data: bytes) -> bytes:
        kept = data[: self.left]
        self.left -= len(kept)
        if len(kept) < len(data):
            self.truncated = True
            self.full.set()
        return kept


async def all_read(*streams: OutputStream) -> None:
    """Waits until every process has closed its end of the pipes."""
    for stream in streams:
        await stream.ended.wait()


class OutputStream(asyncio.Protocol):
    transport: asyncio.BaseTransport

    def __init__(self, output: CommandOutput) -> None:
        self.output, self.data = output, bytearray()
        self.ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.data += self.output.take(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set()

    def read_present(self) -> None:
        """Reads the data that is in the pipe now, which a busy event loop has not read yet."""
        pipe = self.transport.get_extra_info("pipe")
        if not self.ended.is_set() and not pipe.closed:
            with contextlib.suppress(BlockingIOError):
                self.data_received(os.read(pipe.fileno(), _LARGEST_PIPE))

    def text(self) -> str:
        return self.data.decode(errors="replace")
