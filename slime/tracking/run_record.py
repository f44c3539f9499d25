"""Records a whole process in the journal: that a run began, how it ended, and the warnings of its log."""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slime.config.secrets import mask_secrets
from slime.tracking.events import Events
from slime.user_code import add_location

RESERVE = ".reserved"
"""Name of a file that is deleted to make room for the last event of a run whose disk is full."""
_RESERVE_BYTES = 64 * 1024
_LONGEST = 4000
_SAME = 20
"""Maximum number of recorded warnings per line of code."""


class WarningEvents(logging.Handler):
    """Records the warnings and errors that a process logs, up to a maximum per line of code."""

    def __init__(self, events: Events | None) -> None:
        """Makes a handler. `events` is None if the process has no journal yet; then `begin` sets it."""
        super().__init__(logging.WARNING)
        self._events, self._seen = events, Counter[tuple[str, int]]()
        self._early: list[tuple[str, str]] = []

    def begin(self, events: Events) -> None:
        """Starts recording to `events`, first the records that were logged before."""
        self._events, early = events, self._early
        for name, text in early:
            events.add("warning", logger=name, text=text)

    def emit(self, record: logging.LogRecord) -> None:
        location = (record.pathname, record.lineno)
        self._seen[location] += 1
        if self._seen[location] > _SAME:
            return
        text = _shown(record.getMessage())
        if self._events is None:
            self._early.append((record.name, text))
        else:
            self._events.add("warning", logger=record.name, text=text)


def record_warnings(events: Events | None = None) -> WarningEvents:
    """Records the warnings of this process from now on. Returns the handler of the root logger. Without `events`, the
    handler keeps the warnings until its `begin`.

    Without another handler, Python prints warnings with its handler of last resort. Adding a handler disables that
    handler, so it is added, too.
    """
    handler, root = WarningEvents(events), logging.getLogger()
    if not root.handlers and logging.lastResort is not None:
        root.addHandler(logging.lastResort)
    root.addHandler(handler)
    return handler


@contextmanager
def recorded(run_dir: str | Path, rollouts: int | None, session_id: str | None = None) -> Iterator[Events]:
    """Records the run of this block in its driver: the begin, the end or the error that ended the run, and the driver's
    warnings."""
    events, folder = Events("driver", str(run_dir)), Path(run_dir)
    pid = os.getpid()
    named = {} if session_id is None else {"session_id": session_id}
    events.add("run", host=socket.gethostname(), pid=pid, born=born(pid), rollouts=rollouts, **named)
    (folder / RESERVE).write_bytes(bytes(_RESERVE_BYTES))
    handler = record_warnings(events)
    try:
        yield events
    except KeyboardInterrupt:
        _last(events, folder, "end", state="interrupted")
        raise
    except BaseException as error:
        record_error(events, folder, error)
        raise
    else:
        _last(events, folder, "end", state="finished")
    finally:
        logging.getLogger().removeHandler(handler)
        events.close()


def record_end(run_dir: Path) -> None:
    """Records the end of a run that had finished all rollouts when its driver was killed."""
    events = Events("driver", str(run_dir))
    _last(events, run_dir, "end", state="finished")
    events.close()


def record_error(events: Events, run_dir: Path, error: BaseException) -> None:
    """Records the error that ends a run."""
    cause = getattr(error, "cause", None)
    shown = cause if isinstance(cause, Exception) else error
    log = Path(getattr(error, "log", "driver.log")).name
    text = _shown(str(shown)) or type(shown).__name__
    if shown is cause:  # the text of Ray's error has the traceback of the other process
        text = add_location(text, str(error))
    _last(events, run_dir, "error", type=type(shown).__name__, text=text, log=f"logs/{log}")


def _shown(text: str) -> str:
    """Returns a text for the journal: without secrets, and not too long."""
    return str(mask_secrets(text[:_LONGEST]))


def _last(events: Events, run_dir: Path, kind: str, **fields: object) -> None:
    """Adds an event for which the reserve makes room.

    If the disk is still full, the event is lost, and no error of writing replaces the error of the run.
    """
    with suppress(OSError):
        (run_dir / RESERVE).unlink(missing_ok=True)
    with suppress(OSError, ValueError):
        events.add(kind, **fields)


def born(pid: int) -> int | None:
    """Returns the start time of a process of this host, in clock ticks since the boot, or None if it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])
