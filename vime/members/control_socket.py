"""Serves the requests of `vime engines` on a unix socket in a temporary folder, which only the run's user can enter.

The client sends one line of JSON, {"do": "add" | "remove", ...}. The driver answers with lines {"say": text} during the
work. The last line is {"done": text}, {"refused": text} for an error that the user can correct, or {"failed": text}.
The driver serves one request after another, while the training loop continues. The run's events contain the socket's
path.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypedDict

from slime.protocols import EnginePool
from slime.roles.served import POLICY
from slime.tracking.events import Events
from vime.pool.pool import ServerPool

logger = logging.getLogger(__name__)
_LONGEST = 65536
_SEND_S = 5.0


class ControlRequest(TypedDict, total=False):
    """The command's request. `model` is the served model that gets the engines."""

    do: str
    model: str
    count: int
    address: str | None
    engine: str
    wait_s: float


class ControlSocket:
    """Accepts requests from its creation on, and rejects changes until `start` is called.

    The policy's pool calls `notify` with the number of the policy's engines that take new requests, after each change.
    """

    def __init__(
        self, run_dir: str | None, pools: Mapping[str, EnginePool], notify: Callable[[int], None]
    ) -> None:
        self._pools = {name: pool for name, pool in pools.items() if isinstance(pool, ServerPool)}
        if POLICY in self._pools:
            self._pools[POLICY].changes.notify = notify
        self._is_started = self._is_closed = False
        self._turn = threading.Lock()
        self.path = Path(tempfile.mkdtemp(prefix="vime-engines-")) / "engines.sock"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(self.path))
        self._socket.listen()
        events = Events("engines", run_dir)
        if self._pools:
            events.add("control_socket", socket=str(self.path), host=socket.gethostname(), pid=os.getpid())
        events.close()
        threading.Thread(target=self._listen, name="engines-control", daemon=True).start()

    def start(self) -> None:
        """Allows changes. The caller calls `start` once the engines serve."""
        self._is_started = True

    def close(self) -> None:
        """Closes the socket and deletes its folder. A request that is being served ends when the pools end."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with contextlib.suppress(OSError):
            self.path.unlink()
            self.path.parent.rmdir()

    def _listen(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(
                target=self._serve, args=(connection,), name="engines-request", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        """Serves one request. The request continues if its client disconnects."""
        with connection, contextlib.suppress(OSError):
            if _peer_user_id(connection) not in (os.getuid(), 0):
                return
            connection.settimeout(_SEND_S)
            with connection.makefile("rb") as lines:
                line = lines.readline(_LONGEST)
            if not line:  # The client only checked whether the run still runs.
                return

            def send(kind: str, text: str) -> None:
                with contextlib.suppress(OSError):
                    connection.sendall(json.dumps({kind: text}).encode() + b"\n")

            try:
                with self._turn:
                    done = self._do(json.loads(line), lambda text: send("say", text))
            except ValueError as error:
                send("refused", str(error))
            except Exception as error:  # border of this thread: the client prints the error
                logger.warning("vime engines failed: %s", error)
                send("failed", f"{error}")
            else:
                send("done", done)

    def _do(self, asked: ControlRequest, say: Callable[[str], None]) -> str:
        if not self._is_started:
            raise ValueError(
                "a run must serve before its engines change, got one that starts; try again later"
            )
        if asked["do"] == "remove":
            pool = self._pools[self._find_model(asked["engine"])]
            return pool.changes.remove(asked["engine"], asked["wait_s"], say)
        if asked["model"] not in self._pools:
            raise ValueError(
                f"--model must be one of {', '.join(self._pools)}, got {asked['model']}; `vime engines list` shows them"
            )
        changes, address = self._pools[asked["model"]].changes, asked["address"]
        titles = changes.add(asked["count"], say) if address is None else changes.take_in(address, say)
        return f"{' and '.join(titles)} joined; a run that resumes has its configured engines alone"

    def _find_model(self, engine: str) -> str:
        """Returns the engine's model. Returns the policy for an unknown engine, so that the policy's pool reports the
        error."""
        for name, pool in self._pools.items():
            if pool.changes.has(engine):
                return name
        return POLICY


def _peer_user_id(connection: socket.socket) -> int:
    """Returns the user id of the client's process."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: int = struct.unpack("3i", raw)[1]
    return user
