"""Tests blocking requests to a server that is frozen, or that never answers because it is shutting down."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from vime.pool.control import request


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def ask(listener: socket.socket, timeout_s: float) -> float:
    """Returns the seconds until a request to a server that never answers was given up."""
    port, began = listener.getsockname()[1], time.monotonic()
    with pytest.raises(OSError):
        request(f"http://127.0.0.1:{port}", "key", "POST", "/update_weights", {}, timeout_s=timeout_s)
    return time.monotonic() - began


def test_a_server_that_no_longer_listens_is_not_waited_for(listener: socket.socket) -> None:
    """uvicorn does this when vLLM's engine process has died: it shuts down, and waits for its open requests."""

    def accept_and_close() -> None:
        held.append(listener.accept()[0])
        listener.close()

    held: list[socket.socket] = []
    thread = threading.Thread(target=accept_and_close)
    thread.start()
    assert ask(listener, timeout_s=60) < 10
    thread.join()
    held[0].close()


def test_a_server_that_listens_has_the_whole_time(listener: socket.socket) -> None:
    assert 2.5 <= ask(listener, timeout_s=2.5) < 10
