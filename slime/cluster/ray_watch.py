"""Detects the end of a process of Ray itself: its control server (gcs_server) or the raylet of a node.

Ray's own calls then wait for up to a minute, and its client ends the process with a message of C++. The watch connects
to these processes' ports every second, and interrupts the driver's main thread when nothing listens any more.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

import ray

from slime.cluster.watchdog import Watchdog
from slime.system.waiting import report_wait

_EVERY_S, _CONNECT_S, _REFUSALS = 1.0, 2.0, 2
_END_S = 12.0
"""Seconds in which the main thread must end the run after the loss."""


_LOST = threading.Event()


class RayLost(RuntimeError):
    """A process of Ray ended before the run."""


@dataclass(frozen=True)
class RayProcess:
    """A process of Ray and its port."""

    name: str
    """Name of the process for a user."""
    host: str
    port: int

    def listens(self) -> bool:
        """Returns False only if the host refuses the connection. A slow host does not mean a dead process."""
        try:
            socket.create_connection((self.host, self.port), timeout=_CONNECT_S).close()
        except ConnectionError:
            return False
        except OSError:
            pass
        return True


def leave(code: int) -> int:
    """Returns the exit code of the process, or ends the process here if Ray was lost.

    After a loss, the threads of the process still wait in Ray's client. Without a server, they start a new Ray, or end
    the process with a message of C++.
    """
    if _LOST.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def parts(nodes: Iterable[str] = ()) -> list[RayProcess]:
    """Returns the control server, the raylet of this process's node, and the raylets of `nodes` (Ray's ids)."""
    context = ray.get_runtime_context()
    host, _, port = context.gcs_address.rpartition(":")
    needed = {context.get_node_id(), *nodes}
    return [
        RayProcess(f"Ray's control server gcs_server at {context.gcs_address}", host, int(port)),
        *(
            RayProcess(
                f"Ray's raylet on node {node['NodeManagerAddress']} ({node['NodeManagerHostname']})",
                node["NodeManagerAddress"],
                node["NodeManagerPort"],
            )
            for node in ray.nodes()  # type: ignore[no-untyped-call]
            if node["NodeID"] in needed and node["Alive"]
        ),
    ]


class RayWatch:
    """The context manager of all parts that need Ray, from Ray's start to its shutdown.

    `callback` registers calls that must run before Ray ends. If Ray is lost, these calls are skipped, because they
    would wait for Ray; the watchdog then kills the processes. RayLost then replaces the error that the loss has caused:
    the error of an actor, or the interrupt of this watch. `on_failure` prints the loss if the main thread hangs in
    Ray's code.
    """

    def __init__(self, watchdog: Watchdog, on_failure: Callable[[Exception], None]) -> None:
        self._watchdog, self._on_failure = watchdog, on_failure
        self._parts: list[RayProcess] = []
        self._stack = ExitStack()
        self._interrupted, self._over = False, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ray-watch", daemon=True)

    def __enter__(self) -> RayWatch:
        self._thread.start()
        return self

    def watch(self, needed: list[RayProcess]) -> None:
        """Watches these processes from now on."""
        self._parts = needed

    def callback(self, stop: Callable[[], None]) -> None:
        """Calls `stop` at the end of the context, unless Ray is lost by then. The last callback is called first."""

        def unless_lost() -> None:
            if self.lost() is None:
                stop()

        self._stack.callback(unless_lost)

    def lost(self) -> str | None:
        """Returns an error that names the first process that has ended, or None."""
        for part in self._parts:
            if not part.listens():
                return (
                    f"{part.name} must run until the run ends, got no process that listens there; look in the kernel's "
                    "log (dmesg) for a kill, and give the same command again: with --load it resumes from the last "
                    "checkpoint"
                )
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lost = self.lost()
        try:
            with report_wait("ending the engines and the trainer"):
                self._stack.close()
        finally:
            self._over.set()  # before the shutdown, which ends Ray's processes
            self._thread.join()
            if self.lost() is None:
                ray.shutdown()
            else:
                _LOST.set()
                self._watchdog.kill_all()
        by_user = isinstance(error, KeyboardInterrupt) and not self._interrupted
        if lost is not None and error is not None and not by_user:
            raise RayLost(lost) from (error if isinstance(error, Exception) else None)

    def _watch(self) -> None:
        """Runs the thread of the watch."""
        refused = 0
        while refused < _REFUSALS:
            if self._over.wait(_EVERY_S):
                return
            line = self.lost()
            refused = 0 if line is None else refused + 1
        self._interrupted = True
        main = threading.main_thread().ident
        assert main is not None and line is not None
        signal.pthread_kill(main, signal.SIGTERM)
        if self._over.wait(_END_S):
            return
        # The main thread waits in Ray's C++ code, where no exception reaches it.
        self._on_failure(RayLost(line))
        self._watchdog.kill_all(remove=True)
        os._exit(1)
