"""Runs a server as a supervised subprocess with a log file. This is the base of engine servers and routers.

The module starts, watches and stops the process, and finds and checks free ports. It imports neither torch nor vLLM.
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
from slime.system.import_path import ROOT, SAFE_PATH, UTF8, entries
from vime.pool.asgi import KEY_VARIABLE
from vime.pool.control import answers
from vime.pool.log_cause import first_error
from vime.run.surroundings import without_proxies

TAIL_LINES = 30
FREE_PORTS = range(20000, 32768)
"""Ports above the ports of Ray's workers, and below the ports that Linux assigns to sockets (ip_local_port_range)."""
_GRACE_S = 10.0
_WARNING = re.compile(r"\.py:\d+: \w*Warning: ")
_SEARCHED_BYTES = 8 << 20


def hold_port(host: str, port: int = 0) -> socket.socket:
    """Returns a socket bound to `port`, or to a free port of FREE_PORTS. The socket does not listen.

    While the socket is open, no other run gets the port from this function. A server that sets SO_REUSEADDR (vLLM,
    vllm-router and most others do) can bind the port and listen. RuntimeError if 100 tries find no port.
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
    """Returns a port of FREE_PORTS that is free at `host` now. The port is not reserved."""
    with hold_port(host) as held:
        port: int = held.getsockname()[1]
    return port


def accepts(host: str, port: int) -> bool:
    """Returns True if a server listens at host:port. A connection that takes more than a second also counts, because a
    busy server accepts slowly."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except TimeoutError:
        return True
    except OSError:
        return False
    return True


def require_free_port(host: str, port: int, what: str) -> None:
    """Raises ValueError if `what` cannot listen at host:port, for example because the port is in use."""
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
    """Makes SIGTERM raise KeyboardInterrupt in this block, so that the block stops its processes in order."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class SupervisedProcess:
    """Runs a command under `vime.pool.supervise`. The command and all its children end at `stop()`, or when this
    process ends, even by SIGKILL. Standard output and error are appended to `log_path`. `grace_s` is the number of
    seconds between SIGTERM and SIGKILL. `send` needs `takes_input`."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        log_path: str,
        *,
        grace_s: float = _GRACE_S,
        takes_input: bool = False,
    ) -> None:
        self.log_path, self._grace_s = log_path, grace_s
        Path(log_path).parent.mkdir(parents=True, exist_ok=True)
        flags = ["--input"] if takes_input else []
        supervised = [sys.executable, "-m", "vime.pool.supervise", *flags, str(grace_s), *command]
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
        """Returns the exit status, or None while the process runs."""
        return self._process.poll()

    def send(self, data: bytes, log_path: str) -> None:
        """Sends data to the command, which appends its further output to `log_path`. OSError if it has ended."""
        self.log_path, path = log_path, Path(log_path)
        self._log_begins = path.stat().st_size if path.exists() else 0
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def whereabouts(self) -> tuple[str, bool]:
        """Returns process id and host as text, and True if a signal has stopped one of the processes."""
        server = [process.pid for process in descendants(self.pid, recursive=False)] or [self.pid]
        text = f"process {server[0]} on {socket.gethostname()}"
        stopped = [process.pid for process in descendants(self.pid) if is_stopped(process)]
        if stopped:
            pids = " ".join(map(str, stopped))
            text += f", where a signal (SIGSTOP) has stopped {pids}: `kill -CONT {pids}` continues it"
        return text, bool(stopped)

    def tail_log(self, lines: int = TAIL_LINES) -> str:
        """Returns the last lines of the log since this start."""
        return tail(self.log_path, lines, begins=self._log_begins)

    def cause(self) -> str | None:
        """Returns the cause of a failure from the log, or None; see vime.pool.log_cause."""
        with contextlib.suppress(OSError), open(self.log_path, "rb") as file:
            file.seek(self._log_begins)
            return first_error(file.read(_SEARCHED_BYTES).decode(errors="replace"))
        return None

    def stop(self) -> None:
        """Stops the command and its children with SIGTERM, and with SIGKILL after `grace_s`. Returns when all processes
        have ended. It may be called again."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # data that `send` could not write
                self._process.stdin.close()
        try:
            self._process.wait(timeout=self._grace_s + 10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def tail(path: str, lines: int = TAIL_LINES, *, begins: int = 0) -> str:
    """Returns the last `lines` lines of a text file after its first `begins` bytes, or "" for a missing file. It leaves
    out Python's warnings, because they do not explain why a process ended."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(begins, file.tell() - 800 * lines))
        found = file.read().decode(errors="replace").splitlines()
        return "\n".join([*_without_warnings(found)][-lines:])
    return ""


def _without_warnings(lines: Iterable[str]) -> Iterator[str]:
    """Yields the lines without the output of Python's `warnings`: the warning, and the indented lines below it."""
    in_warning = False
    for line in lines:
        in_warning = bool(_WARNING.search(line)) or (in_warning and line.startswith((" ", "\t")))
        if not in_warning:
            yield line


def ended_how(status: int | None) -> str:
    """Returns the exit status, and the signal if one ended the process, for a message; "" for a running process."""
    if status is None:
        return ""
    number = -status if status < 0 else status - 128
    name = next((one.name for one in signal.Signals if one == number), None)
    return f"exit status {status}" if name is None else f"exit status {status}, from {name}"


def wait_ready(
    process: SupervisedProcess, ready: Callable[[], bool], what: str, timeout_s: float, flag: str
) -> None:
    """Returns once `ready()` returns True. Raises RuntimeError, with the last log lines, if `process` ends before, or
    after `timeout_s` seconds."""
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
    """The settings that every server of a run has. With `port` 0, the server gets a free port at its start."""

    run_key: str = field(repr=False)
    log_path: str
    host: str = "127.0.0.1"
    port: int = 0
    start_timeout_s: float = 60.0

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


class Started(Protocol):
    """The methods of a starting server that `require_running` calls."""

    def wait_ready(self) -> None: ...
    def poll(self) -> int | None: ...


def require_running(servers: Iterable[Started]) -> None:
    """Raises the error of `wait_ready` for the first server that has ended. A caller that waits for another event while
    servers start calls this function repeatedly."""
    for server in servers:
        if server.poll() is not None:
            server.wait_ready()


S = TypeVar("S", bound=ServerSpec)


class Server(Generic[S]):
    """Starts and watches one server. It is not thread-safe. Call `start`, `wait_ready` and `stop` in this order."""

    name: ClassVar[str]
    ready_path: ClassVar[str]  # a route that answers 200 to the run's key once the server serves
    timeout_flag: ClassVar[str]  # where `start_timeout_s` comes from, for the error

    def __init__(self, spec: S) -> None:
        self.spec = spec
        self._process: SupervisedProcess | None = None
        self._held: list[socket.socket] = []

    def command(self) -> list[str]:
        """Returns the command line, which contains no secret."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """Returns the environment of this process without proxies, with the run's key and the path of this package."""
        path = os.pathsep.join([ROOT, *entries(os.environ)])
        return {**without_proxies(os.environ), "PYTHONPATH": path, KEY_VARIABLE: self.spec.run_key}

    def choose_port(self) -> None:
        """Reserves a free port if the port is 0, so that other processes can get the address before the server
        listens."""
        if self.spec.port == 0:
            self.spec = replace(self.spec, port=self._hold())

    def _hold(self, host: str = "", port: int = 0) -> int:
        """Reserves a port for this server for the lifetime of this object, and returns its number. The port is `port`,
        which must be free, or any free port, at `host` or at the server's host."""
        self._held.append(hold_port(host or self.spec.host, port))
        number: int = self._held[-1].getsockname()[1]
        return number

    def _take_port(self, host: str, port: int, what: str) -> None:
        """Reserves a port for the server that starts now. Raises ValueError if the port is in use."""
        self._share_ports(True)
        require_free_port(host, port, what)
        if all(held.getsockname()[1] != port for held in self._held):
            self._hold(host, port)

    def _share_ports(self, shared: bool) -> None:
        """Allows or forbids that other sockets bind the reserved ports. The server's socket must bind them; afterwards
        no other socket may, even after the server has ended."""
        for held in self._held:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(shared))

    def start(self) -> str:
        """Starts the server and returns its URL before it is ready. A second start keeps the URL.

        Raises ValueError if the port is in use or the server cannot listen at the host.
        """
        self.choose_port()
        self._take_port(self.spec.host, self.spec.port, self.name)
        self._process = self._start_process()
        return self.spec.url

    def _start_process(self) -> SupervisedProcess:
        return SupervisedProcess(self.command(), self.environment(), self.spec.log_path)

    def wait_ready(self) -> None:
        """Returns once the server serves. Raises RuntimeError, with the last log lines, if it ends before or takes
        longer than `start_timeout_s`."""
        wait_ready(
            self._started(),
            self.is_ready,
            f"{self.name} at {urlsplit(self.spec.url).netloc}",
            self.spec.start_timeout_s,
            self.timeout_flag,
        )
        self._share_ports(False)

    def is_ready(self) -> bool:
        """Returns True if the server answers on `ready_path`."""
        return answers(self.spec.url, self.spec.run_key, self.ready_path, timeout_s=5)

    def poll(self) -> int | None:
        """Returns the exit status, or None while the server runs."""
        return self._started().poll()

    def whereabouts(self) -> tuple[str, bool]:
        """Returns process id and host as text, and True if a signal has stopped one of the server's processes."""
        return self._started().whereabouts()

    def tail_log(self) -> str:
        """Returns the last lines of the server's log."""
        return self._started().tail_log()

    def stop(self) -> None:
        """Stops the server and all its child processes. It does nothing if the server was never started."""
        if self._process is not None:
            self._process.stop()

    def _started(self) -> SupervisedProcess:
        assert self._process is not None, "start() comes first"
        return self._process
