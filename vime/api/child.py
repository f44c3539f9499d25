"""`python -m vime.api.child FLAGS`: runs `vime train FLAGS` as long as the process that called `vime.train` lives.

The caller holds the write end of this process's standard input. When that end closes, the run ends in order, as after
SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from vime.cli import main


def _end_with_caller() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a caller in the background of a shell ignores it
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # the caller reads the lines from a file
    threading.Thread(target=_end_with_caller, daemon=True).start()
    sys.exit(main(["train", *sys.argv[1:]]))
