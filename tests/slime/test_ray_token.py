"""The token of a Ray cluster: the file that holds it, and who gets in without it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from slime.cluster import ray_token

ROOT = Path(__file__).parents[2]
CONNECT = (
    "import ray; from slime.cluster.placement import connect\n"
    "connect(); print('nodes', len(ray.nodes())); ray.shutdown()"
)


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
        ray_token.use_given_token({"RAY_AUTH_MODE": "disabled"})


def environment(**variables: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable, **variables}


@contextmanager
def started(command: list[str], log: Path, **variables: str) -> Iterator[None]:
    """`command` while it runs; afterwards it and its descendants are ended by id."""
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


def wait_for_port(port: int, log: Path) -> None:
    end = time.monotonic() + 60
    while "Ray runtime started" not in log.read_text(errors="replace"):
        assert time.monotonic() < end, log.read_text(errors="replace")[-2000:]
        time.sleep(0.1)


def client(port: int, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = environment(RAY_ADDRESS=f"127.0.0.1:{port}", HOME=str(home), **variables)
    return subprocess.run(
        [sys.executable, "-c", CONNECT], env=env, capture_output=True, text=True, timeout=90, check=False
    )


@pytest.fixture
def short() -> Iterator[Path]:
    """Unix sockets have short paths only."""
    with tempfile.TemporaryDirectory(prefix="vray-") as path:
        yield Path(path)


def test_only_clients_with_the_token_get_in(short: Path) -> None:
    port, token, other = free_port(), short / "token", short / "other"
    ray_token.make_token_file(other)
    head = [
        "bash",
        str(ROOT / "scripts" / "ray-cluster.sh"),
        "head",
        f"--temp-dir={short / 'r'}",
        "--num-cpus=1",
    ]
    with started(head, short / "log", TOKEN_FILE=str(token), NODE_IP="127.0.0.1", PORT=str(port)):
        wait_for_port(port, short / "log")
        good = client(port, short, RAY_AUTH_TOKEN_PATH=str(token))
        assert good.returncode == 0 and "nodes 1" in good.stdout, good.stderr[-3000:]
        ray_token.require_authentication(f"127.0.0.1:{port}")  # whoever has no token is refused
        wrong = client(port, short, RAY_AUTH_TOKEN_PATH=str(other))
        assert wrong.returncode == 1 and "AuthenticationError" in wrong.stderr, wrong.stderr[-3000:]
        none = client(port, short)
        assert none.returncode == 1 and "RAY_AUTH_TOKEN_PATH must name the file" in none.stderr


def test_a_cluster_that_admits_anyone_is_not_joined(short: Path) -> None:
    port, token = free_port(), short / "token"
    ray_token.make_token_file(token)
    head = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=1"]
    head += [f"--port={port}", "--node-ip-address=127.0.0.1", f"--temp-dir={short / 'r'}"]
    head += ["--include-dashboard=false", "--disable-usage-stats"]
    variables = {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    with started(head, short / "log", **variables):
        wait_for_port(port, short / "log")
        refused = client(port, short, RAY_AUTH_TOKEN_PATH=str(token))
        assert refused.returncode == 1, refused.stdout
        assert "must ask for a token" in refused.stderr and "--allow-unauthenticated-ray" in refused.stderr
