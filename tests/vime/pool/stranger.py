"""Runs a server of another user: `python stranger.py UID PORT LOG [RELAYED_PORT]`.

It takes the port as an attacker on a shared host would, with SO_REUSEADDR, and writes all received bytes to LOG. It
answers every request with 200, or with the answer of the server at RELAYED_PORT to the same bytes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

UID = 54321
only_as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start another user's process")
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 26\r\nConnection: close\r\n\r\n"
BODY = b'{"workers": [], "urls":[]}'


@dataclass
class Stranger:
    """A running server of another user."""

    port: int
    log: Path
    process: subprocess.Popen[str]

    @property
    def heard(self) -> str:
        """Returns all bytes that it received."""
        return self.log.read_text(errors="replace")


@contextlib.contextmanager
def stranger(folder: Path, port: int = 0, relayed: int = 0) -> Iterator[Stranger]:
    """Starts a stranger at `port` of loopback. Raises OSError if the kernel does not let it listen."""
    log = folder / f"stranger-{port}"
    log.touch()
    argv = [sys.executable, __file__, str(UID), str(port), str(log), *([str(relayed)] if relayed else [])]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline().strip()
        if not said.isdigit():
            raise OSError(said)
        yield Stranger(int(said), log, process)
    finally:
        process.kill()
        process.communicate()


def serve(connection: socket.socket, log: int, relayed: int) -> None:
    with connection, contextlib.suppress(OSError):
        asked = connection.recv(1 << 16)
        os.write(log, asked)
        if relayed:
            with socket.create_connection(("127.0.0.1", relayed)) as other:
                other.sendall(asked)
                while piece := other.recv(1 << 16):
                    connection.sendall(piece)
        else:
            connection.sendall(OK + BODY)


def main(uid: int, port: int, log: Path, relayed: int = 0) -> None:
    written = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.setresuid(uid, uid, uid)
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", port))
            listening.listen(100)
        except OSError as error:
            print(error, flush=True)
            return
        print(listening.getsockname()[1], flush=True)
        while True:
            threading.Thread(
                target=serve, args=(listening.accept()[0], written, relayed), daemon=True
            ).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:]))
