"""What the journal has of a whole process: that a run began, how it ended, and the warnings of its log."""

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
from slime.user_code import with_place

RESERVE = ".reserved"
"""A file that gives its room to the last event of a run whose disk is full."""
_RESERVE_BYTES = 64 * 1024
_LONGEST = 4000
_SAME = 20
"""Warnings of one line of code that are recorded."""


class WarningEvents(logging.Handler):
    """Records the warnings and errors that a process logs; the first ones of each line of code."""

    def __init__(self, events: Events | None) -> None:
        """`events`: None where the process has no journal yet; `begin` gives it."""
        super().__init__(logging.WARNING)
        self._events, self._seen = events, Counter[tuple[str, int]]()
        self._early: list[tuple[str, str]] = []

    def begin(self, events: Events) -> None:
        """Record to `events`, first what was logged before."""
        self._events, early = events, self._early
        for name, text in early:
            events.add("warning", logger=name, text=text)

    def emit(self, record: logging.LogRecord) -> None:
        place = (record.pathname, record.lineno)
        self._seen[place] += 1
        if self._seen[place] > _SAME:
            return
        text = _shown(record.getMessage())
        if self._events is None:
            self._early.append((record.name, text))
        else:
            self._events.add("warning", logger=record.name, text=text)


def record_warnings(events: Events | None = None) -> WarningEvents:
    """Record the warnings of this process from now on. Returns the handler of the root logger that does so. Without
    `events`, it keeps them until its `begin`.

    Without another handler, Python prints warnings by its last resort, which a handler turns off: so it is added, too.
    """
    handler, root = WarningEvents(events), logging.getLogger()
    if not root.handlers and logging.lastResort is not None:
        root.addHandler(logging.lastResort)
    root.addHandler(handler)
    return handler


@contextmanager
def recorded(run_dir: str | Path, rollouts: int | None) -> Iterator[Events]:
    """The block is a run, in its driver: its begin, its end or the error that ended it, and the driver's warnings."""
    events, folder = Events("driver", str(run_dir)), Path(run_dir)
    pid = os.getpid()
    events.add("run", host=socket.gethostname(), pid=pid, born=born(pid), rollouts=rollouts)
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
    """The end of a run that had done all its work when its driver was killed."""
    events = Events("driver", str(run_dir))
    _last(events, run_dir, "end", state="finished")
    events.close()


def record_error(events: Events, run_dir: Path, error: BaseException) -> None:
    """The error that ends a run."""
    cause = getattr(error, "cause", None)
    shown = cause if isinstance(cause, Exception) else error
    log = Path(getattr(error, "log", "driver.log")).name
    text = _shown(str(shown)) or type(shown).__name__
    if shown is cause:  # the text of Ray's error has the traceback of the other process
        text = with_place(text, str(error))
    _last(events, run_dir, "error", type=type(shown).__name__, text=text, log=f"logs/{log}")


def _shown(text: str) -> str:
    """A text as the journal keeps it: without secrets, and not too long."""
    return str(mask_secrets(text[:_LONGEST]))


def _last(events: Events, run_dir: Path, kind: str, **fields: object) -> None:
    """Add an event for which the reserve makes room. A disk that is still full keeps no event, and the error of the run
    is not replaced by its own."""
    with suppress(OSError):
        (run_dir / RESERVE).unlink(missing_ok=True)
    with suppress(OSError, ValueError):
        events.add(kind, **fields)


def born(pid: int) -> int | None:
    """When a process of this host started, in clock ticks since the boot. None if it is not there."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])
