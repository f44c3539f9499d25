"""Runs one engine over several nodes: a server process per node, started and stopped together.

vLLM runs such an engine in its multi-node mode. The process on the first node serves HTTP, the other processes run only
workers (`--headless`), and all connect to an address of the first node. vLLM does not detect that another node's
process has died, so this class does: when one process has ended, the engine has ended.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from vime.pool.process import ended_how

_POLL_S = 0.2


class NodeServer(Protocol):
    """The server process of one node (EngineServer, RayEngineServer)."""

    def meeting_point(self) -> str: ...
    def start(self, master: str = "") -> str: ...
    def open_gate(self) -> None: ...
    def wait_ready(self) -> None: ...
    def poll(self) -> int | None: ...
    def whereabouts(self) -> tuple[str, bool]: ...
    def tail_log(self) -> str: ...
    def stop(self) -> None: ...


class NodesServer:
    """The pool's EngineHandle for the server processes of an engine, in the order of their nodes."""

    def __init__(self, members: Sequence[NodeServer]) -> None:
        self._members = list(members)

    def start(self) -> str:
        """Starts all processes and returns the URL of the first process."""
        first, *others = self._members
        master = first.meeting_point()
        url = first.start(master)
        for other in others:
            other.start(master)
        return url

    def open_gate(self) -> None:
        for member in self._members:
            member.open_gate()

    def wait_ready(self) -> None:
        """Returns once the engine serves. Raises RuntimeError if a node's process ends before."""
        first, *others = self._members
        with ThreadPoolExecutor(1) as thread:
            serving = thread.submit(first.wait_ready)
            try:
                while not serving.done():
                    for number, other in enumerate(others, start=1):
                        if (status := other.poll()) is not None:
                            raise RuntimeError(self._ended(number, status))
                    time.sleep(_POLL_S)
            except BaseException:
                self.stop()  # ends the wait for the first one, too
                raise
            serving.result()

    def poll(self) -> int | None:
        """Returns the exit status of the first process that has ended, or None while all processes run."""
        return next((status for _, status in self._statuses()), None)

    def whereabouts(self) -> tuple[str, bool]:
        """Returns the text of the nodes with a stopped process, or else of the first node, and True if one is
        stopped."""
        found = [member.whereabouts() for member in self._members]
        stopped = [text for text, is_stopped in found if is_stopped]
        return "; ".join(stopped) or found[0][0], bool(stopped)

    def tail_log(self) -> str:
        """Returns the last log lines of the processes that have ended, or else of the first process."""
        ended = [self._ended(number, status) for number, status in self._statuses()]
        return "\n".join(ended) or self._members[0].tail_log()

    def stop(self) -> None:
        """Stops all processes at the same time."""
        with ThreadPoolExecutor(len(self._members)) as threads:
            list(threads.map(lambda member: member.stop(), self._members))

    def _statuses(self) -> list[tuple[int, int]]:
        """Returns (node, exit status) of the processes that have ended."""
        statuses = [(number, member.poll()) for number, member in enumerate(self._members)]
        return [(number, status) for number, status in statuses if status is not None]

    def _ended(self, number: int, status: int) -> str:
        return (
            f"the server process of node {number + 1} of {len(self._members)} of the engine ended with "
            f"{ended_how(status)}; its last log lines:\n{self._members[number].tail_log()}"
        )
