"""Tests supervised processes: no process outlives its owner, logs can be read, ports are checked."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from vime.pool import process
from vime.pool.engine_server import EngineServer, EngineSpec, Standby
from vime.pool.process import SupervisedProcess, ended_how, free_port, require_free_port, tail, wait_ready
from vime.pool.router import RouterSpec
from vime.vllm.router import VllmRouter

# A process with a child that ignores SIGTERM and a grandchild in another session.
_STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
print("up", flush=True)
time.sleep(100)
"""
# Like an engine's server, this forks an engine, which forks a worker. A child of another thread outlives that thread.
_FORKS = """
import os, threading, time
from vime.pool.supervise import forks_die_with_parent
forks_die_with_parent()
forks_die_with_parent()
def fork(then):
    if os.fork() == 0:
        then()
        time.sleep(100)
thread = threading.Thread(target=fork, args=[lambda: None])
thread.start()
thread.join()
time.sleep(0.5)
fork(lambda: fork(lambda: None))
time.sleep(100)
"""
_OWNER = """
import os, sys, time
from vime.pool.process import SupervisedProcess
SupervisedProcess([sys.executable, "-c", sys.argv[1]], os.environ, sys.argv[2])
time.sleep(100)
"""


def processes_below(pid: int, count: int, timeout_s: float = 10) -> list[psutil.Process]:
    end = time.monotonic() + timeout_s
    while len(found := psutil.Process(pid).children(recursive=True)) < count:
        assert time.monotonic() < end, found
        time.sleep(0.02)
    return found


def test_output_goes_to_the_log_and_the_status_comes_back(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "a.log"
    script = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"
    process = SupervisedProcess([sys.executable, "-c", script], os.environ, str(log))
    process._process.wait(timeout=10)
    assert process.poll() == 7
    assert sorted(process.tail_log().splitlines()) == ["err", "out"]
    process.stop()


def test_a_killed_command_is_seen(tmp_path: Path) -> None:
    process = SupervisedProcess(
        [sys.executable, "-c", "import time; time.sleep(100)"], os.environ, str(tmp_path / "l")
    )
    (child,) = processes_below(process.pid, 1)
    child.kill()
    process._process.wait(timeout=10)
    assert process.poll() == 128 + signal.SIGKILL


def test_stop_ends_grandchildren_in_other_sessions_too(tmp_path: Path) -> None:
    gentle = _STUBBORN.replace("signal.SIG_IGN", "signal.SIG_DFL")
    process = SupervisedProcess([sys.executable, "-c", gentle], os.environ, str(tmp_path / "l"))
    below = processes_below(process.pid, 2)
    process.stop()
    assert process.poll() == 128 + signal.SIGTERM
    assert psutil.wait_procs(below, timeout=5)[1] == []
    process.stop()


def test_what_ignores_sigterm_is_killed_after_the_grace() -> None:
    command = [sys.executable, "-m", "vime.pool.supervise", "0.3", sys.executable, "-c", _STUBBORN]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    below = processes_below(process.pid, 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=5) == 128 + signal.SIGKILL
    assert psutil.wait_procs(below, timeout=5)[1] == []


def test_nothing_survives_a_kill_9_of_the_owner(tmp_path: Path) -> None:
    gentle = _STUBBORN.replace("signal.SIG_IGN", "signal.SIG_DFL")
    owner = subprocess.Popen([sys.executable, "-c", _OWNER, gentle, str(tmp_path / "log")])
    below = processes_below(owner.pid, 3)
    owner.kill()
    owner.wait()
    assert psutil.wait_procs(below, timeout=5)[1] == []


def test_forks_of_the_main_thread_alone_die_with_their_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", _FORKS])
    below = processes_below(parent.pid, 3)
    engine = next(one for one in below if one.children())
    worker = engine.children()[0]
    (of_a_thread,) = set(below) - {engine, worker}
    parent.kill()
    parent.wait()
    try:
        assert psutil.wait_procs([engine, worker], timeout=5)[1] == []
        assert of_a_thread.is_running()
    finally:
        of_a_thread.kill()


_LISTENS = """
import os, socket, sys, time
from vime.pool.supervise import forks_die_with_parent
forks_die_with_parent()
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
ours, theirs = socket.socketpair()
if os.fork() == 0:
    theirs.sendall(b"a pair stays")
    time.sleep(100)
print(ours.recv(20).decode(), flush=True)
time.sleep(100)
"""


def test_a_fork_does_not_keep_the_port_of_its_server_open() -> None:
    port = free_port("127.0.0.1")
    parent = subprocess.Popen([sys.executable, "-c", _LISTENS, str(port)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdout.readline() == "a pair stays\n"
    engine = psutil.Process(parent.pid).children()[0]
    assert [c.laddr.port for c in psutil.Process(parent.pid).net_connections("tcp")] == [port]
    assert engine.net_connections("tcp") == [] and engine.net_connections("unix") != []
    parent.kill()
    parent.wait()
    assert psutil.wait_procs([engine], timeout=5)[1] == []


def test_a_process_that_ends_before_it_is_ready_shows_its_log(tmp_path: Path) -> None:
    script = "print('line 1'); print('no such model'); raise SystemExit(2)"
    process = SupervisedProcess([sys.executable, "-c", script], os.environ, str(tmp_path / "l.log"))
    with pytest.raises(
        RuntimeError, match=r"(?s)the thing must become healthy, got exit status 2; .*no such model"
    ):
        wait_ready(process, lambda: False, "the thing", 10, "--some-timeout-s")


def test_a_process_that_is_never_ready_names_the_flag(tmp_path: Path) -> None:
    process = SupervisedProcess(
        [sys.executable, "-c", "import time; time.sleep(9)"], os.environ, str(tmp_path / "l")
    )
    with pytest.raises(
        RuntimeError, match=r"within --some-timeout-s 0\.3, got no answer; the last lines of .*l:"
    ):
        wait_ready(process, lambda: False, "the thing", 0.3, "--some-timeout-s")
    process.stop()


def test_tail_gives_the_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"line {i}\n" for i in range(10_000)))
    assert tail(str(path), 3) == "line 9997\nline 9998\nline 9999"
    assert tail(str(tmp_path / "none")) == ""


def test_tail_leaves_out_the_warnings_of_libraries(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = ["import warnings", "print('first', flush=True)", "warnings.warn('Apex is not installed')"]
    lines += ["warnings.warn('old', FutureWarning)", "raise KeyError('question')"]
    (tmp_path / "library.py").write_text("\n".join(lines))
    with path.open("w") as log:
        subprocess.run([sys.executable, str(tmp_path / "library.py")], stderr=log, stdout=log, check=False)
    written = path.read_text()
    assert "UserWarning: Apex" in written and "FutureWarning: old" in written
    kept = tail(str(path)).splitlines()
    assert kept[:2] == ["first", "Traceback (most recent call last):"] and kept[-1] == "KeyError: 'question'"
    assert not [line for line in kept if "Warning" in line or "warnings.warn" in line]


def test_the_log_of_a_server_that_was_killed_begins_at_its_last_start(tmp_path: Path) -> None:
    """The error of a killed router has no lines of an earlier start, and names the signal."""
    log = tmp_path / "router.log"
    log.write_text("of an earlier start\n")
    script = "import os; print('of this start', flush=True); os.kill(os.getpid(), 9)"
    process = SupervisedProcess([sys.executable, "-c", script], os.environ, str(log))
    with pytest.raises(RuntimeError, match="got exit status 137, from SIGKILL; the last lines") as caught:
        wait_ready(process, lambda: False, "the router", 10, "--some-timeout-s")
    assert str(caught.value).endswith("router.log:\nof this start")
    assert process.tail_log() == "of this start"


@pytest.mark.parametrize(
    ("status", "how"),
    [
        (None, ""),
        (0, "exit status 0"),
        (1, "exit status 1"),
        (-11, "exit status -11, from SIGSEGV"),
        (143, "exit status 143, from SIGTERM"),
        (255, "exit status 255"),
    ],
)
def test_the_end_of_a_process_names_its_signal(status: int | None, how: str) -> None:
    assert ended_how(status) == how


def test_ports() -> None:
    port = free_port("127.0.0.1")
    require_free_port("127.0.0.1", port, "it")
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(ValueError, match=rf"the port of it must be free, got 127\.0\.0\.1:{port} in use"):
            require_free_port("127.0.0.1", port, "it")
    with pytest.raises(ValueError, match=r"it must be able to listen at 192\.0\.2\.1"):
        require_free_port("192.0.2.1", port, "it")


def test_a_routers_port_is_its_own_from_the_choice_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router's address is given out seconds before it binds, and so is that of its gateway. Here every run would
    choose from four ports."""
    ports = [free_port("127.0.0.1") for _ in range(4)]
    monkeypatch.setattr(process, "FREE_PORTS", ports)
    one, two = (VllmRouter(RouterSpec(run_key="k", log_path=str(tmp_path / name))) for name in "ab")
    assert sorted([one.spec.port, one.spec.gateway_port, two.spec.port, two.spec.gateway_port]) == sorted(
        ports
    )
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", one.spec.port))
    for router in (one, two):
        try:
            router.start()
            router.wait_ready()
            assert router.engines() == []
        finally:
            router.stop()


_LEAVES_A_SEMAPHORE = """
import multiprocessing, os, signal, sys
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name, flush=True)
signal.pause()
"""


def test_a_killed_server_leaves_no_semaphore(tmp_path: Path) -> None:
    """Python's resource tracker, a child process of the server, removes it after the server."""
    script = _LEAVES_A_SEMAPHORE
    server = SupervisedProcess([sys.executable, "-c", script], os.environ, str(tmp_path / "log"))
    processes_below(server.pid, 2)
    while not (name := server.tail_log()):
        time.sleep(0.02)
    semaphore = Path("/dev/shm") / f"sem.{name.removeprefix('/')}"
    assert semaphore.exists()
    server.stop()
    assert not semaphore.exists()


class Imported(EngineServer):
    """An engine whose standby prints its order."""

    def standby_command(self) -> list[str]:
        return [sys.executable, "-c", "print('waits', flush=True); print(input())"]

    def environment(self) -> dict[str, str]:
        return {**os.environ, **self.spec.env}


def test_an_engine_becomes_the_standby_only_in_its_environment(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    spec = EngineSpec(run_key="k", log_path=str(log), model_path="", weight_dir="", env={"A": "1"})
    standby, waiting = Standby(0.01), tmp_path / "engine-standby.log"

    def keep() -> None:
        while standby._process is None:
            standby.keep(Imported, spec)
            time.sleep(0.01)
        while not (waiting.exists() and "waits" in waiting.read_text()):
            time.sleep(0.01)

    assert standby.take([], {}, "") is None
    keep()
    env = {**os.environ, "A": "1", "VIME_ENGINE": "engine-0-2", "CUDA_VISIBLE_DEVICES": "3"}
    process = standby.take(["serve", "--port", "1"], env, str(log))
    assert process is not None and process.log_path == str(log)
    while process.poll() is None:
        time.sleep(0.01)
    order = json.loads(waiting.read_text().splitlines()[-1])
    assert (order["command"], order["env"]["CUDA_VISIBLE_DEVICES"]) == (["serve", "--port", "1"], "3")
    waiting.unlink()
    keep()
    other = standby._process
    assert other is not None and standby.take(["serve"], {**env, "A": "2"}, str(log)) is None
    assert other.poll() is not None
    standby.stop()
    standby.keep(Imported, spec)
    assert standby._process is None


def test_a_standby_is_left_out_for_engines_of_several_nodes_and_without_a_delay(tmp_path: Path) -> None:
    spec = EngineSpec(run_key="k", log_path=str(tmp_path / "log"), model_path="", weight_dir="", nodes=2)
    for standby, one in ((Standby(1e-9), spec), (Standby(0), replace(spec, nodes=1))):
        for _ in range(2):
            standby.keep(Imported, one)
        assert standby._process is None
