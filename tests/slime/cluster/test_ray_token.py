"""Tests the token of a Ray cluster: the file that holds it, and the errors of clients without it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import ray

from slime.cluster import ray_token

ROOT = Path(__file__).parents[3]
GCS_SERVER = Path(ray.__file__).parent / "core" / "src" / "ray" / "gcs" / "gcs_server"
CONNECT = (
    "import ray; from slime.cluster.ray_start import connect\n"
    "connect(); print('nodes', len(ray.nodes())); ray.shutdown()"
)
PLAIN = "import ray; ray.init(); print('nodes', len(ray.nodes()))"
"""A client of Ray without this project's code."""


def test_a_made_file_is_closed_to_others_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "new" / "token"
    assert ray_token.main(["--make", str(path)]) == 0
    token = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600 and len(token) == 64
    assert ray_token.main(["--make", str(path)]) == 0
    assert path.read_text() == token
    with pytest.raises(FileExistsError):
        ray_token.make_token_file(path)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_a_file_open_to_others_is_refused_with_the_remedy(tmp_path: Path, mode: int, capsys) -> None:
    path = tmp_path / "token"
    path.write_text("secret")
    path.chmod(mode)
    assert ray_token.main([str(path)]) == 1
    error = capsys.readouterr().err
    assert f"chmod 600 {path}" in error and "secret" not in error


def test_a_missing_or_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(ValueError, match=r"must exist, got .*--make"):
        ray_token.check_token_file(path)
    path.touch(0o600)
    with pytest.raises(ValueError, match=r"must hold a token"):
        ray_token.check_token_file(path)


def test_token_mode_switched_off_is_refused() -> None:
    with pytest.raises(ValueError, match=r"RAY_AUTH_MODE must be token, got disabled"):
        ray_token.use_user_token({"RAY_AUTH_MODE": "disabled"})


def test_a_client_without_a_token_is_refused_before_it_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ValueError, match=r"RAY_AUTH_TOKEN_PATH must name the file"):
        ray_token.use_user_token({})


def environment(**variables: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable, **variables}


@contextmanager
def started(command: list[str], log: Path, **variables: str) -> Iterator[None]:
    """Runs `command` during a `with` block, and then ends it and its descendants by id."""
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command, env=environment(**variables), stdout=file, stderr=subprocess.STDOUT
        )
    try:
        yield
    finally:
        parts = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(parts, timeout=10)
        for part in alive:
            part.kill()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_until(ready: Callable[[], bool], log: Path) -> None:
    end = time.monotonic() + 120
    while not ready():
        assert time.monotonic() < end, log.read_text(errors="replace")[-2000:]
        time.sleep(0.1)


def answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def start_client(code: str, port: int, home: Path, **variables: str) -> subprocess.Popen[str]:
    env = environment(RAY_ADDRESS=f"127.0.0.1:{port}", HOME=str(home), **variables)
    return subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture
def short() -> Iterator[Path]:
    """Yields a folder with a short path, because paths of Unix sockets have a limit."""
    with tempfile.TemporaryDirectory(prefix="vray-") as path:
        yield Path(path)


def test_only_clients_with_the_token_get_in(short: Path) -> None:
    port, token, other, log = free_port(), short / "token", short / "other", short / "log"
    ray_token.make_token_file(other)
    command = ["bash", str(ROOT / "scripts" / "ray-cluster.sh"), "head"]
    command += [f"--temp-dir={short / 'r'}", "--num-cpus=1", "--object-store-memory=80000000"]
    with started(command, log, TOKEN_FILE=str(token), NODE_IP="127.0.0.1", PORT=str(port)):
        wait_until(lambda: "Ray runtime started" in log.read_text(errors="replace"), log)
        once = {"RAY_NUM_REDIS_GET_RETRIES": "1"}  # otherwise Ray retries for 20 s
        # Without the second variable, Ray would use another address of this host, where nothing listens.
        none = {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        clients = {
            "right": start_client(CONNECT, port, short, RAY_AUTH_TOKEN_PATH=str(token)),
            "wrong": start_client(CONNECT, port, short, RAY_AUTH_TOKEN_PATH=str(other), **once),
            "none": start_client(PLAIN, port, short, **none, **once),
        }
        try:
            ends = {name: client.communicate(timeout=90) for name, client in clients.items()}
        finally:
            for client in clients.values():
                client.kill()
    assert clients["right"].returncode == 0 and "nodes 1" in ends["right"][0], ends["right"]
    for name in ("wrong", "none"):
        out, error = ends[name]
        assert clients[name].returncode == 1 and "nodes" not in out, ends[name]
        assert "AuthenticationError" in error, ends[name]


class Recorder:
    """Forwards connections to a port of this host, and records the bytes that the clients send."""

    def __init__(self, target: int) -> None:
        self.sent, self._target = bytearray(), target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(("127.0.0.1", self._target))
            threading.Thread(target=self._pass_on, args=(client, server, self.sent), daemon=True).start()
            threading.Thread(target=self._pass_on, args=(server, client, bytearray()), daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
        try:
            while data := source.recv(65536):
                kept += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # one side has closed; the other side ends with the test


def test_a_cluster_that_admits_anyone_gets_no_token(short: Path) -> None:
    """The server is Ray's own, without authentication. `connect` raises an error and never sends the token."""
    port, path, log = free_port(), short / "token", short / "log"
    ray_token.make_token_file(path)
    command = [str(GCS_SERVER), f"--log_dir={short}", f"--gcs_server_port={port}"]
    command += ["--node-ip-address=127.0.0.1", "--session-name=open"]
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}
    with started(command, log, RAY_AUTH_MODE="disabled"):
        wait_until(lambda: answers(port), log)
        refusing, asking = Recorder(port), Recorder(port)
        clients = [
            start_client(CONNECT, refusing.port, short, **token),
            # This client does not check the server first. It proves that the recorder would see the token.
            start_client(
                "import os; from ray._raylet import GcsClient\n"
                "GcsClient(address=os.environ['RAY_ADDRESS']).internal_kv_keys(b'', None, timeout=20)",
                asking.port,
                short,
                **token,
            ),
        ]
        try:
            (_, error), (_, other) = [client.communicate(timeout=90) for client in clients]
        finally:
            for client in clients:
                client.kill()
    assert clients[0].returncode == 1, error
    assert "must ask for a token" in error and "--allow-unauthenticated-ray" in error
    assert clients[1].returncode == 0 and path.read_bytes() in asking.sent, other
    assert refusing.sent and path.read_bytes() not in refusing.sent
