"""A run that this process has started: its output, its end, and the callbacks after each rollout."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from slime.tracking.journal import read_events
from slime.tracking.run_summary import RunState
from vime.api.records import Run

if TYPE_CHECKING:
    from vime.types import Callback

CHILD = ("-m", "vime.api.child")
_EVERY_S = 0.2
_ERROR = "vime train: "
"""Begin of the line with which a run that failed ends its standard error."""


class RunOutput:
    """The standard output or error of the run, in a file without a name."""

    def __init__(self) -> None:
        self.file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self._shown = 0

    def text(self, start: int = 0) -> str:
        self.file.seek(start)
        return self.file.read().decode(errors="replace")

    def error(self) -> str:
        """Returns the text of the error that ended the run, or the whole output without one."""
        before, found, after = f"\n{self.text()}".rpartition(f"\n{_ERROR}")
        return (after if found else before).strip()

    def new(self) -> str:
        """Returns the complete lines that were not shown before. The error that ends a run is left out, because the
        caller gets it as an exception."""
        text = self.text(self._shown)
        text = text[: text.rfind("\n") + 1]
        self._shown += len(text.encode())
        return f"\n{text}".partition(f"\n{_ERROR}")[0][1:]


class LiveRun(Run):
    """A run that `vime.train` has started. It ends with this process."""

    def __init__(self, argv: Sequence[str], run_dir: Path, callbacks: Sequence[Callback]) -> None:
        super().__init__(run_dir)
        self._callbacks, self._called = callbacks, 0
        self._seen: tuple[int, int] = (0, 0)
        self._stopped, self._problem = False, list[BaseException]()
        self._thread: threading.Thread | None = None
        self._out, self._error, self._began = RunOutput(), RunOutput(), time.time()
        self._process = subprocess.Popen(
            [sys.executable, *CHILD, *argv],
            stdin=subprocess.PIPE,
            stdout=self._out.file,
            stderr=self._error.file,
            start_new_session=True,  # Ctrl-C of a terminal reaches this process alone, which stops the run
        )

    @property
    def state(self) -> RunState:
        """Returns the state of the run: running, finished, failed or interrupted."""
        code = self._process.poll()
        if code is None:
            return "running"
        return "finished" if code == 0 else "interrupted" if code > 128 or code < 0 else "failed"

    @property
    def output(self) -> str:
        """Returns the text that the run has printed."""
        return self._out.text()

    def stop(self) -> None:
        """Asks the run to end, and returns at once. With the flag `save`, the run first saves a checkpoint of its last
        step. A second call ends the run without a checkpoint. `wait` returns after the run's end."""
        self._stopped = True
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def wait(self, timeout_s: float | None = None) -> LiveRun:
        """Prints the progress of the run until its end, and returns the run.

        Raises ValueError for an error that the caller can correct, RuntimeError for a failed run, an error of a
        callback, and TimeoutError after `timeout_s`. A KeyboardInterrupt ends only the wait.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while self._goes_on():
            if end is not None and time.monotonic() > end:
                raise TimeoutError(
                    f"the run must end within {timeout_s:g} s, got a running one; call wait again, or stop"
                )
            time.sleep(_EVERY_S)
        self._raise_problem()
        return self

    def follow(self) -> LiveRun:
        """Waits as `wait` does, for a run that ends with the call: an interrupt stops the run in order."""
        try:
            return self.wait()
        except BaseException:
            if self._process.poll() is None:
                self.stop()
                while self._process.poll() is None:
                    time.sleep(_EVERY_S)
                self._show()
            raise

    def begin(self) -> LiveRun:
        """Returns when the run has passed its checks, and follows it in a thread. Raises the errors of `wait`."""
        while self._process.poll() is None and not self._has_begun():
            time.sleep(_EVERY_S)
        self._raise_problem()
        self._thread = threading.Thread(target=self._attend, name=f"vime run {self.dir}", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends the run at once if it is running, and closes its files. Its records can still be read."""
        self._process.terminate()
        self._process.wait()
        if self._thread is not None:
            self._thread.join()
        assert self._process.stdin is not None
        for file in (self._process.stdin, self._out.file, self._error.file):
            file.close()

    def _attend(self) -> None:
        while self._process.poll() is None:
            self._call_back(last=False)
            time.sleep(_EVERY_S)
        self._call_back(last=True)

    def _goes_on(self) -> bool:
        """Shows new output and calls the callbacks. Returns False after the end of the run and of its callbacks."""
        goes_on = self._process.poll() is None
        self._show()
        if self._thread is None:
            self._call_back(last=not goes_on)
            return goes_on and not self._problem
        return self._thread.is_alive()

    def _show(self) -> None:
        for output, stream in ((self._out, sys.stdout), (self._error, sys.stderr)):
            if text := output.new():
                stream.write(text)
                stream.flush()

    def _has_begun(self) -> bool:
        with contextlib.suppress(ValueError):  # without a journal yet
            events = read_events(self.dir, kinds=("run",), since=self._began)
            return any(event["pid"] == self._process.pid for event in events)
        return False

    def _call_back(self, *, last: bool) -> None:
        """Calls the callbacks for each new rollout. A rollout is complete if nothing was added since the last look, if
        a later rollout follows, or after the end of the run."""
        if not self._callbacks or self._problem:
            return
        rows = self.metrics
        size = len(rows), sum(map(len, rows))
        complete = len(rows) if last or size == self._seen else len(rows) - 1
        self._seen = size
        for row in rows[self._called : max(complete, 0)]:
            self._called += 1
            for callback in self._callbacks:
                try:
                    callback(self, row)
                except BaseException as error:  # border: a callback of the user may raise any error
                    self._problem.append(error)
                    self.stop()
                    return

    def _raise_problem(self) -> None:
        """Raises the error of a callback or of the run, if there is one."""
        if self._problem:
            while self._process.poll() is None:
                time.sleep(_EVERY_S)
            raise self._problem[0]
        code = self._process.poll()
        if code in (None, 0) or (self._stopped and self.state == "interrupted"):
            return
        text = self._error.error() or f"the process of the run ended with exit code {code}"
        raise (ValueError if code == 2 else RuntimeError)(text)

    def __repr__(self) -> str:
        rows = self.metrics
        done = f", rollout {rows[-1]['rollout']:g}" if rows else ""
        reward = rows[-1].get("rollout/raw_reward") if rows else None
        shown = "" if reward is None else f", reward {reward:.3g}"
        return f"<vime run {self.dir}: {self.state}{done}{shown}>"
