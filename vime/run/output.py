"""Keeps standard output and error of a long command usable: a closed pipe or a full disk does not end the command.

`vime train | head` closes the pipe after ten lines, and a log file may be on a disk that is full.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


class _LastingFile(io.FileIO):
    """A file descriptor whose writes do not fail. The first failed write prints a note on the other stream."""

    def __init__(self, descriptor: int, name: str) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._name, self._reported = name, False

    def write(self, data) -> int:  # type: ignore[no-untyped-def]  # any buffer
        try:
            return super().write(data)
        except OSError as error:
            if not self._reported:
                self._reported = True
                other = sys.stdout if self._name == "standard error" else sys.stderr
                print(
                    f"note: {self._name} cannot be written ({error.strerror}); the command continues without it",
                    file=other,
                    flush=True,
                )
            return len(data)


def print_any_text() -> None:
    """Makes characters that the terminal's encoding lacks print as escapes, so that they do not end a command."""
    if type(sys.stdout) is io.TextIOWrapper:
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def lasting_output() -> Iterator[None]:
    """Replaces both streams by such files inside this context."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _lasting(sys.stdout, "standard output"), _lasting(sys.stderr, "standard error")
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


def _lasting(stream: TextIO | None, name: str) -> TextIO:
    if stream is None:  # closed by the shell: `>&-`
        return open(os.devnull, "w", encoding="utf-8", errors="backslashreplace")
    if type(stream) is not io.TextIOWrapper:
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_LastingFile(stream.fileno(), name)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
    )
