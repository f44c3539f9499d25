"""Starts the process of an environment and calls its connector. Every thread and every event loop may call it.

An environment that raises, prints, blocks its event loop or ends its process affects its own episodes only.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import queue
import signal
import subprocess
import threading
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import IO

from slime.config.child_environment import RUN_KEY
from slime.environments.hubs import Environment
from slime.records.errors import FlagError
from slime.types import Json

logger = logging.getLogger(__name__)

START_S = 600.0
"""Seconds in which an environment must be loaded. It may download its data."""
ANSWER_S = 10.0
"""Seconds in which a process must answer after a call was cancelled. A process that does not answer is ended."""
CLOSE_S = 20.0
"""Seconds in which an environment must close its servers."""
_LAST_LINES = 20
_WORKER = Path(__file__).with_name("worker.py")
_CONNECTORS = Path(__file__).with_name("connectors")


class EnvironmentFault(RuntimeError):
    """An environment has raised an error, or its process has ended. The text is one line."""


class EnvironmentProcess:
    """The process of one environment. ValueError, with the flag, if the environment cannot be loaded."""

    def __init__(self, environment: Environment, flag: str = "--environment") -> None:
        self.environment = environment
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Json]] = {}
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._printed: deque[str] = deque(maxlen=_LAST_LINES)
        self.ended = False
        try:
            self._process = subprocess.Popen(
                [environment.python, "-P", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="replace",
                env=_variables(environment.python),
                start_new_session=True,
            )
        except OSError as error:
            said = f"{environment.python!r} ({error.strerror}) in {environment.text!r}"
            raise FlagError(flag, "have a Python that exists as python", said, "check the path") from error
        started = self._waiting[0] = Future()
        assert self._process.stdout is not None and self._process.stderr is not None
        self._logging = threading.Thread(
            target=self._log, args=(self._process.stderr,), name="environment", daemon=True
        )
        self._logging.start()
        threading.Thread(
            target=self._read, args=(self._process.stdout,), name="environment", daemon=True
        ).start()
        threading.Thread(target=self._write, name="environment", daemon=True).start()
        hub = environment.hub
        setup: dict[str, Json] = {"file": str(_CONNECTORS / f"{hub.file}.py"), "name": environment.name}
        setup |= {"arguments": environment.arguments, "module": hub.module, "python": list(hub.python)}
        self._lines.put(json.dumps(setup))
        try:
            lacks = started.result(START_S)
        except (TimeoutError, EnvironmentFault) as error:
            self.end()
            said = str(error) or f"no environment after {START_S:g} s"
            raise FlagError(
                flag,
                "name an environment that its hub can load",
                f"{environment.text!r}: {said}",
                f"install the environment for {environment.python}, or correct its name and arguments",
            ) from error
        if isinstance(lacks, dict):
            self.end()
            raise _lacking(environment, lacks, flag)

    def call(self, name: str, **values: Json) -> Future[Json]:
        """Starts a call of a connector's method. The future raises EnvironmentFault for an error."""
        number = next(self._numbers)
        future: Future[Json] = Future()
        with self._lock:
            if self.ended:
                future.set_exception(EnvironmentFault(self._last_words()))
                return future
            self._waiting[number] = future
        self._lines.put(json.dumps({"id": number, "call": name, "values": values}))
        return future

    async def finish(self, name: str, **values: Json) -> Json:
        """Returns the result of a call. A cancelled call is cancelled in the process, too. If the process does not
        answer then, it is ended, and its other episodes end with EnvironmentFault."""
        future = self.call(name, **values)
        waiting = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            waiting.add_done_callback(
                lambda done: done.cancelled() or done.exception()
            )  # nobody reads it now
            self._cancel(future)
            raise

    def _cancel(self, future: Future[Json]) -> None:
        with self._lock:
            numbers = [number for number, one in self._waiting.items() if one is future]
        for number in numbers:
            self._lines.put(json.dumps({"id": number, "call": "cancel"}))
            timer = threading.Timer(ANSWER_S, self._end_unless_answered, (number,))
            timer.daemon = True
            timer.start()

    def _end_unless_answered(self, number: int) -> None:
        with self._lock:
            hangs = number in self._waiting
        if hangs:
            logger.warning(
                "environment %s: its process has not answered for %g s, so it is ended with its %d episodes",
                *(self.environment.text, ANSWER_S, len(self._waiting)),
            )
            self.end()

    def close(self) -> None:
        """Lets the environment close its servers, and ends its process."""
        self._lines.put(None)

    def end(self) -> None:
        """Ends the process and those that it has started, at once."""
        with self._lock:
            if (
                self._process.poll() is None
            ):  # also if `_read` is just collecting the status of a process that ended
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self, seconds: float) -> None:
        """Waits until the process has ended, and ends it after `seconds`."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.end()
            self._process.wait()

    def _write(self) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        try:
            while (line := self._lines.get()) is not None:
                pipe.write(line + "\n")
                pipe.flush()
            pipe.close()
        except OSError:  # the process has ended, and `_read` reports it
            return

    def _log(self, pipe: IO[str]) -> None:
        with pipe:
            for line in pipe:
                self._printed.append(line.rstrip())
                logger.debug("environment %s: %s", self.environment.text, line.rstrip())

    def _read(self, pipe: IO[str]) -> None:
        with pipe:
            for line in pipe:
                answer = json.loads(line)
                with self._lock:
                    future = self._waiting.pop(answer["id"], None)
                if future is None:
                    continue
                if "error" in answer:
                    future.set_exception(EnvironmentFault(answer["error"]))
                else:
                    future.set_result(answer.get("result", answer.get("lacks")))
        self._process.wait()
        self._logging.join(1)  # a process that the environment has started may keep the pipe open
        with self._lock:
            self.ended = True
            left, self._waiting = list(self._waiting.values()), {}
        self._lines.put(None)
        for future in left:
            future.set_exception(EnvironmentFault(self._last_words()))

    def _last_words(self) -> str:
        printed = next((line for line in reversed(self._printed) if line.strip()), "nothing")
        return f"its process has ended with status {self._process.poll()}, and printed last: {printed[:200]}"


_processes: dict[tuple[int, str], EnvironmentProcess] = {}
"""(id of this process, text of the environment) -> its process. A fork of this process does not use its processes."""
_starting = threading.Lock()


def living(environment: Environment) -> EnvironmentProcess | None:
    """Returns the process of an environment if it runs, else None."""
    process = _processes.get((os.getpid(), environment.text))
    return None if process is None or process.ended else process


def get_process(environment: Environment, flag: str = "--environment") -> EnvironmentProcess:
    """Returns the process of an environment, and starts it if it does not run. Raises the ValueError of
    EnvironmentProcess."""
    with _starting:
        if (process := living(environment)) is None:
            process = _processes[os.getpid(), environment.text] = EnvironmentProcess(environment, flag)
        return process


def close_processes() -> None:
    """Ends the processes of all environments that this process has started."""
    with _starting:
        mine = [key for key in _processes if key[0] == os.getpid()]
        closed = [_processes.pop(key) for key in mine]
    for process in closed:
        process.close()
    for process in closed:
        process.wait(CLOSE_S)


def _variables(python: str) -> dict[str, str]:
    """Returns the variables of the process: the programs of its Python come first, and it gets no key of the run. The
    keys of judges and sandboxes stay, because environments read them."""
    folder = os.path.dirname(os.path.abspath(python))
    kept = {name: value for name, value in os.environ.items() if name != RUN_KEY}
    return kept | {"PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}


def _lacking(environment: Environment, lacks: dict[str, Json], flag: str) -> FlagError:
    """Returns the error of a Python that is too old, or that lacks the package of the hub."""
    hub, python, version = environment.hub, environment.python, next(iter(lacks.values()))
    if "python" in lacks:
        needed = ".".join(map(str, hub.python))
        return FlagError(
            flag,
            f"have Python {needed} or newer for {hub.package}",
            f"Python {version} ({python}) for {environment.text!r}",
            f"python{needed} -m venv hub && hub/bin/pip install {hub.package}, then add ?python=hub/bin/python",
        )
    return FlagError(
        flag,
        f"have the package {hub.package}",
        f"none in {python} for {environment.text!r}",
        f"python -m venv hub && hub/bin/pip install {hub.package}, then add ?python=hub/bin/python",
    )
