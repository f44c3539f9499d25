"""The system calls that Python 3.11 has no function for. Linux, x86-64 and arm64."""

from __future__ import annotations

import ctypes
import os

PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 36, 38
_PR_GET_SECCOMP, _PR_SET_SECCOMP, _FILTER = 21, 22, 2
_PR_CAP_AMBIENT, _CLEAR_ALL = 47, 4

_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_char_p))


def prctl(option: int, value: int, program: _Program | None = None) -> None:
    words = [ctypes.c_ulong(value), ctypes.byref(program) if program else ctypes.c_ulong(0)]
    if _libc.prctl(option, *words, ctypes.c_ulong(0), ctypes.c_ulong(0)) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl {option}: {os.strerror(code)}")


def has_filters() -> None:
    """Raises OSError if the kernel has no filters of system calls."""
    prctl(_PR_GET_SECCOMP, 0)


def restrict(program: bytes) -> None:
    """Applies the BPF program to this process and its later children. Programs that they execute get no
    capabilities."""
    prctl(_PR_CAP_AMBIENT, _CLEAR_ALL)
    prctl(_PR_SET_SECCOMP, _FILTER, _Program(len(program) // 8, program))
