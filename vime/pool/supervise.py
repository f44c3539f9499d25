"""`python -m vime.pool.supervise [--input] GRACE_S COMMAND...`: runs a command that must end with its parent.

With --input, the command gets the data of this process's standard input; otherwise its input is empty. The parent holds
the write end of this process's standard input. When that end closes (on purpose, or because the parent was killed, also
with kill -9), or on TERM or INT, the command gets SIGTERM. After GRACE_S seconds, all processes that are left,
grandchildren included, get SIGKILL. The exit status is that of the command.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import psutil

from slime.cluster.watchdog import is_tracker

_TRACKER_S = 2.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Makes the kernel send SIGKILL to this process when the parent's calling thread ends. It works on Linux only."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@functools.cache
def forks_die_with_parent() -> None:
    """Makes forked children end with this process, because a fork does not inherit `die_with_parent`.

    It covers only forks of the main thread: a child ends with the thread that forked it, and other threads may end
    earlier. The children also close inherited TCP sockets. Otherwise the port of an ended server would listen until its
    engine has ended. Only the first call in a process has an effect.
    """
    by_main = False

    def before() -> None:
        nonlocal by_main
        by_main = threading.current_thread() is threading.main_thread()

    def in_child() -> None:
        if by_main:
            die_with_parent()
            _close_tcp_sockets()

    os.register_at_fork(before=before, after_in_child=in_child)


def _close_tcp_sockets() -> None:
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing is closed, and some are no sockets
            found = socket.socket(fileno=int(entry))
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                found.close()
            else:
                found.detach()


def main(argv: Sequence[str]) -> int:
    """Runs the command `argv[1:]` with `argv[0]` as the grace in seconds. Returns the exit status, or 128 + the signal
    that ended the command."""
    takes_input = argv[0] == "--input"
    grace_s, *command = argv[1:] if takes_input else argv
    # Orphans of the command become children of this process, so that they can be found and ended.
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, _noted)
    stdin = subprocess.PIPE if takes_input else subprocess.DEVNULL
    child = subprocess.Popen(command, stdin=stdin, preexec_fn=die_with_parent)
    while child.poll() is None:
        ready, _, _ = select.select([sys.stdin.fileno(), wake_read], [], [])
        if sys.stdin.fileno() in ready and _send_on(child):
            continue
        if sys.stdin.fileno() in ready or _ended_by_signal(os.read(wake_read, 64)):
            child.terminate()
            _wait(child, float(grace_s))
            break
    if child.poll() is None:
        child.kill()
    status = child.wait()
    _end_descendants()
    return status if status >= 0 else 128 - status


def _send_on(child: subprocess.Popen[bytes]) -> bool:
    """Writes the waiting data to the command. Returns False at the end of the data, and for a command without input."""
    data = os.read(sys.stdin.fileno(), 1 << 16)
    if not data or child.stdin is None:
        return False
    with contextlib.suppress(BrokenPipeError):  # the command has ended
        child.stdin.write(data)
        child.stdin.flush()
    return True


def _noted(number: int, frame: object) -> None:
    """Does nothing: `main` reads the signal from the wake-up pipe."""


def _ended_by_signal(numbers: bytes) -> bool:
    return bool({signal.SIGTERM, signal.SIGINT} & set(numbers))


def _wait(child: subprocess.Popen[bytes], grace_s: float) -> None:
    end = time.monotonic() + grace_s
    while child.poll() is None and time.monotonic() < end:
        time.sleep(0.02)


def _end_descendants() -> None:
    """Sends SIGKILL to the children of this process until no child is left. Children of a killed process become
    children of this process.

    Python's resource trackers get _TRACKER_S seconds to end, because they remove semaphores from /dev/shm.
    """
    began = time.monotonic()
    while below := psutil.Process().children():
        patient = time.monotonic() - began < _TRACKER_S
        spared = {process for process in below if patient and is_tracker(process)}
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
                if process not in spared:
                    process.kill()
                os.waitpid(process.pid, os.WNOHANG if process in spared else 0)
        if spared:
            time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
