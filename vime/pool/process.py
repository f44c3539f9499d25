"""One server as a supervised subprocess with a log file: the common part of engine servers and routers.

Owns start, watch and end of the process, free ports, and the check that a port is free. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import ClassVar, Generic, Protocol, TypeVar
from urllib.parse import urlsplit

from slime.cluster.watchdog import descendants, is_stopped
from slime.import_path import ROOT, SAFE_PATH, UTF8, entries
from vime.pool.asgi import KEY_VARIABLE
from vime.pool.control import answers
from vime.pool.log_cause import cause_of
from vime.run.surroundings import without_proxies

TAIL_LINES = 30
FREE_PORTS = range(20000, 32768)
"""Above the ports of Ray's workers, and below those that Linux gives to sockets by itself (ip_local_port_range)."""
_GRACE_S = 10.0
_WARNING = re.compile(r"\.py:\d+: \w*Warning: ")
_SEARCHED_BYTES = 8 << 20


def hold_port(host: str, port: int = 0) -> socket.socket:
    """A socket bound to `port`, or to a port of FREE_PORTS that no other socket has. It does not listen.

    While it is open, no other run gets the port from this function. A server that sets SO_REUSEADDR (vLLM, vllm-router
    and most others do) can bind the port and listen. RuntimeError if 100 tries find no port.
    """
    for _ in range(100):
        held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        if port:  # connections of an earlier server may still close
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((host, port or random.SystemRandom().choice(FREE_PORTS)))
        except OSError:
            held.close()
            continue
        held.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # after the bind, which must share with nobody
        return held
    raise RuntimeError(
        f"a server must have a free port at {host}, got none in 100 tries from {FREE_PORTS.start} to "
        f"{FREE_PORTS.stop - 1}; check that {host} is an address of this machine"
    )


def free_port(host: str) -> int:
    """A port of FREE_PORTS that nothing has at `host` now. Nothing keeps it free."""
    with hold_port(host) as held:
        port: int = held.getsockname()[1]
    return port


def accepts(host: str, port: int) -> bool:
    """Whether something listens at host:port. A connection that takes longer than a second counts: a busy server."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except TimeoutError:
        return True
    except OSError:
        return False
    return True


def require_free_port(host: str, port: int, what: str) -> None:
    """ValueError when `what` cannot listen at host:port because something does already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ValueError(
                    f"the port of {what} must be free, got {host}:{port} in use; choose another port"
                ) from error
            raise ValueError(
                f"{what} must be able to listen at {host}:{port}, got: {error.strerror}"
            ) from error


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM is Ctrl-C for this block: what it started ends in order."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class SupervisedProcess:
    """A command under `vime.pool.supervise`: it ends, with all its children, at `stop()` or when this process ends,
    however it ends. Standard output and error are appended to `log_path`. `grace_s` is its time to end by itself."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], log_path: str, *, grace_s: float = _GRACE_S
    ) -> None:
        self.log_path, self._grace_s = log_path, grace_s
        Path(log_path).parent.mkdir(parents=True, exist_ok=True)
        supervised = [sys.executable, "-m", "vime.pool.supervise", str(grace_s), *command]
        with open(log_path, "ab") as log:
            self._log_begins = log.tell()
            self._process = subprocess.Popen(
                supervised,
                env={**env, **SAFE_PATH, **UTF8},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C is for the driver, which stops its servers in order
            )

    @property
    def pid(self) -> int:
        """Process id of the supervisor, the parent of the command."""
        return self._process.pid

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        return self._process.poll()

    def whereabouts(self) -> tuple[str, bool]:
        """Its process and host in words, and whether a signal has stopped a process of it."""
        server = [process.pid for process in descendants(self.pid, recursive=False)] or [self.pid]
        text = f"process {server[0]} on {socket.gethostname()}"
        stopped = [process.pid for process in descendants(self.pid) if is_stopped(process)]
        if stopped:
            pids = " ".join(map(str, stopped))
            text += f", where a signal (SIGSTOP) has stopped {pids}: `kill -CONT {pids}` continues it"
        return text, bool(stopped)

    def tail_log(self, lines: int = TAIL_LINES) -> str:
        """The last lines of the log since this start."""
        return tail(self.log_path, lines, begins=self._log_begins)

    def cause(self) -> str | None:
        """Why it failed, from what it has logged; see vime.pool.log_cause."""
        with contextlib.suppress(OSError), open(self.log_path, "rb") as file:
            file.seek(self._log_begins)
            return cause_of(file.read(_SEARCHED_BYTES).decode(errors="replace"))
        return None

    def stop(self) -> None:
        """End it and all its children: SIGTERM, after the grace SIGKILL. Returns when nothing is left; repeatable."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=self._grace_s + 10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def tail(path: str, lines: int = TAIL_LINES, *, begins: int = 0) -> str:
    """The last `lines` lines of a text file after its first `begins` bytes; "" when there is none. Warnings of Python's
    libraries, which have no part in an end, are left out."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(begins, file.tell() - 800 * lines))
        found = file.read().decode(errors="replace").splitlines()
        return "\n".join([*_without_warnings(found)][-lines:])
    return ""


def _without_warnings(lines: Iterable[str]) -> Iterator[str]:
    """The lines without those that Python's `warnings` prints: the warning, and the indented lines below it."""
    in_warning = False
    for line in lines:
        in_warning = bool(_WARNING.search(line)) or (in_warning and line.startswith((" ", "\t")))
        if not in_warning:
            yield line


def ended_how(status: int | None) -> str:
    """How a process ended, for a sentence: the signal, or the exit status. "" for one that runs."""
    if status is None:
        return ""
    number = -status if status < 0 else status - 128
    name = next((one.name for one in signal.Signals if one == number), None)
    return f"exit status {status}" if name is None else f"exit status {status}, from {name}"


def wait_ready(
    process: SupervisedProcess, ready: Callable[[], bool], what: str, timeout_s: float, flag: str
) -> None:
    """Return once `ready()` holds. RuntimeError, with the last log lines, when `process` ends before or time is up."""
    end = time.monotonic() + timeout_s
    while not ready():
        status = process.poll()
        if status is not None:
            raise RuntimeError(f"{what} must become healthy, got {ended_how(status)}; {_log_lines(process)}")
        if time.monotonic() >= end:
            raise RuntimeError(
                f"{what} must become healthy within {flag} {timeout_s:g}, got no answer; {_log_lines(process)}"
            )
        time.sleep(0.1)


def _log_lines(process: SupervisedProcess) -> str:
    cause = process.cause()
    return f"{cause + '; ' if cause else ''}the last lines of {process.log_path}:\n{process.tail_log()}"


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """What every server of a run has. `port` 0: a free one is picked when it starts."""

    run_key: str = field(repr=False)
    log_path: str
    host: str = "127.0.0.1"
    port: int = 0
    start_timeout_s: float = 60.0

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


class Started(Protocol):
    """What `require_running` needs of a server that is on its way."""

    def wait_ready(self) -> None: ...
    def poll(self) -> int | None: ...


def require_running(servers: Iterable[Started]) -> None:
    """For a wait on something else while servers start: what `wait_ready` says of the first one that has ended."""
    for server in servers:
        if server.poll() is not None:
            server.wait_ready()


S = TypeVar("S", bound=ServerSpec)


class Server(Generic[S]):
    """Starts and watches one server. Not thread-safe; `start`, `wait_ready`, `stop` in that order."""

    name: ClassVar[str]
    ready_path: ClassVar[str]  # a route that answers 200 to the run's key once the server serves
    timeout_flag: ClassVar[str]  # where `start_timeout_s` comes from, for the error

    def __init__(self, spec: S) -> None:
        self.spec = spec
        self._process: SupervisedProcess | None = None
        self._held: list[socket.socket] = []

    def command(self) -> list[str]:
        """The command line; holds no secret."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """This process's own without proxies, with the key and the way to this package."""
        path = os.pathsep.join([ROOT, *entries(os.environ)])
        return {**without_proxies(os.environ), "PYTHONPATH": path, KEY_VARIABLE: self.spec.run_key}

    def choose_port(self) -> None:
        """Hold a free port for it, if it has none yet. Others may learn the address before it listens."""
        if self.spec.port == 0:
            self.spec = replace(self.spec, port=self._hold())

    def _hold(self, host: str = "", port: int = 0) -> int:
        """A port that is this server's while this object lives, at its own host or another address of this machine: a
        free one, or `port`, which nothing has."""
        self._held.append(hold_port(host or self.spec.host, port))
        number: int = self._held[-1].getsockname()[1]
        return number

    def _take_port(self, host: str, port: int, what: str) -> None:
        """Hold a port for the server that starts now. ValueError when something listens there."""
        self._share_ports(True)
        require_free_port(host, port, what)
        if all(held.getsockname()[1] != port for held in self._held):
            self._hold(host, port)

    def _share_ports(self, shared: bool) -> None:
        """Whether another socket than the held ones may be bound to the held ports: the server's own must, and then no
        stranger's, also after the server has ended."""
        for held in self._held:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(shared))

    def start(self) -> str:
        """Start it and return its URL, before it is ready; a second start keeps the URL.

        ValueError when the port is taken or the host cannot be listened at.
        """
        self.choose_port()
        self._take_port(self.spec.host, self.spec.port, self.name)
        self._process = SupervisedProcess(self.command(), self.environment(), self.spec.log_path)
        return self.spec.url

    def wait_ready(self) -> None:
        """Return once it serves. RuntimeError with the last log lines when it ends before, or never does."""
        wait_ready(
            self._started(),
            self.is_ready,
            f"{self.name} at {urlsplit(self.spec.url).netloc}",
            self.spec.start_timeout_s,
            self.timeout_flag,
        )
        self._share_ports(False)

    def is_ready(self) -> bool:
        """Whether it serves."""
        return answers(self.spec.url, self.spec.run_key, self.ready_path, timeout_s=5)

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        return self._started().poll()

    def whereabouts(self) -> tuple[str, bool]:
        """Its process and host in words, and whether a signal has stopped a process of it."""
        return self._started().whereabouts()

    def tail_log(self) -> str:
        """The last lines of its log."""
        return self._started().tail_log()

    def stop(self) -> None:
        """End it and everything it started; nothing to do when it was never started."""
        if self._process is not None:
            self._process.stop()

    def _started(self) -> SupervisedProcess:
        assert self._process is not None, "start() comes first"
        return self._process
