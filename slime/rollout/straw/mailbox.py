"""Calls of rollout hosts to the owner of the queue, through two small files per host in the shared folder.

    hosts/NAME/call.json     written by the host: the number of the call, the owner's start, operations
    hosts/NAME/reply.json    written by the owner: the number of the call, one result per operation

A host has one call at a time, which has all operations that have come together meanwhile. The folder has no more files
after a million calls than after the first one, and hosts need no network path to the trainer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from slime.rollout.straw.folder import Plain, QueueFolder, read_plain, write_plain

logger = logging.getLogger(__name__)
CALL, REPLY = "call.json", "reply.json"
POLL_S = 0.05
Result: TypeAlias = Any  # The type depends on the operation.
"""The result of an operation, as plain data."""
Handle = Callable[[str, str, Plain], Result]
"""Performs (host, operation, arguments)."""


class OwnerRestarted(Exception):
    """The owner of the queue has restarted or ended, so all earlier leases are lost."""


class Link(Protocol):
    """The way from a host to the owner of the queue."""

    async def call(self, operation: str, **arguments: object) -> Result:
        """Returns the result of an operation. Raises OwnerRestarted if the leases of this host are lost."""
        ...


@dataclass
class DirectLink:
    """The link inside the owner's process. `run` calls a function in a thread."""

    host: str
    handle: Handle
    run: Callable[..., Awaitable[Result]]

    async def call(self, operation: str, **arguments: object) -> Result:
        return await self.run(self.handle, self.host, operation, dict(arguments))


@dataclass
class Mailbox:
    """The link of another process. Use it in one event loop."""

    folder: QueueFolder
    host: str
    start: int
    """The owner's start in which the leases of this host are valid."""
    _waiting: list[tuple[str, Plain, asyncio.Future[Result]]] = field(default_factory=list)
    _number: int = 0
    _pump: asyncio.Task[None] | None = None

    async def call(self, operation: str, **arguments: object) -> Result:
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((operation, dict(arguments), future))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._send())
        return await future

    async def _send(self) -> None:
        """Sends what waits, until nothing waits."""
        while self._waiting:
            batch, self._waiting = self._waiting, []
            operations: list[list[object]] = [[operation, arguments] for operation, arguments, _ in batch]
            try:
                results = await self._exchange(operations)
            except (OwnerRestarted, RuntimeError) as error:
                for _, _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for result, (_, _, future) in zip(results, batch, strict=True):
                if not future.done():  # a cancelled task does not wait
                    future.set_result(result)

    async def _exchange(self, operations: list[list[object]]) -> list[Result]:
        own = self.folder.hosts / self.host
        self._number += 1
        call = {"number": self._number, "start": self.start, "operations": operations}
        write_plain(own / CALL, call)
        while True:
            reply = read_plain(own / REPLY) or {}
            if reply.get("number") == self._number and reply.get("start") == self.start:
                if reply["error"]:
                    raise RuntimeError(
                        f"the owner of the queue must perform the calls of its hosts, got {reply['error']}; start the "
                        "rollout host again, and see rollout.log of the run"
                    )
                return list(reply["results"])
            state = read_plain(self.folder.state)
            if state is not None and (state["start"] != self.start or state["ended"]):
                raise OwnerRestarted
            await asyncio.sleep(POLL_S)


class Postman:
    """The owner's thread that performs the hosts' calls."""

    def __init__(self, folder: QueueFolder, start: int, handle: Handle) -> None:
        self._folder, self._start, self._handle = folder, start, handle
        self._done: dict[str, int] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollout-queue-calls", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ending.wait(POLL_S):
            for own in self._folder.hosts.iterdir():
                self._serve(own)

    def _serve(self, own: Path) -> None:
        call = read_plain(own / CALL)
        if call is None or call["start"] != self._start or self._done.get(own.name) == call["number"]:
            return
        self._done[own.name] = call["number"]
        results, failure = list[Result](), ""
        try:
            results += [self._handle(own.name, operation, named) for operation, named in call["operations"]]
        except Exception as error:  # border to other processes: one host's call does not end the queue
            logger.exception("the call of rollout host %s failed", own.name)
            failure = f"{type(error).__name__}: {error}"
        reply = {"number": call["number"], "start": self._start, "results": results, "error": failure}
        with contextlib.suppress(FileNotFoundError):  # a user has removed the folder of the host
            write_plain(own / REPLY, reply)
