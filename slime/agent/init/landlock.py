"""Hides files from the commands of a sandbox without namespaces: Landlock, Linux 5.13 and newer.

`forbid_writes` confines a launch script of `vime rehearse`. In a sandbox, a command may read, list and execute only
below the folders that a sandbox with namespaces shows. Landlock also hides
the memory and the environment of all other processes. It cannot exclude a folder inside an allowed folder, so `allowed`
yields the entries around a hidden path.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
from collections.abc import Iterable, Iterator

from slime.agent.init.bubblewrap import DEVICES, SYSTEM

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _READ_FILE, _READ_DIR = 1, 4, 8
_WRITE_FILE = 2
_WRITES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
_TCP, _HAS_TCP = 3, 4
"""Bits that restrict binding and connecting, and the first version of Landlock with them."""
_NO_NEW_PRIVS = 38
_REFER, _TRUNCATE = 1 << 13, 1 << 14
"""Rights that newer versions of Landlock restrict: links between folders, and truncation."""
_OF_FOLDERS = _EXECUTE | _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _READ_FILE
SEMAPHORES = "/dev/shm"
"""Folder in which Python's multiprocessing and other programs open their semaphores."""
_SCOPED, _HAS_SCOPES = 3, 6
"""Bits that restrict abstract Unix sockets and signals, and the first version of Landlock with them."""

_libc = ctypes.CDLL(None, use_errno=True)


def _call(number: int, *words: object) -> int:
    """Raises OSError if the kernel refuses the call."""
    returned = int(_libc.syscall(ctypes.c_long(number), *words))
    if returned < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"landlock: {os.strerror(code)}")
    return returned


def version() -> int:
    """Returns the version of Landlock in this kernel, or 0 for a kernel without Landlock."""
    try:
        return _call(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION))
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
            return 0
        raise


def ruleset(paths: Iterable[str], *, scoped: bool) -> int | None:
    """Returns a descriptor for `restrict` that allows reads only below `paths`, or None without Landlock.

    With `scoped`, signals and abstract Unix sockets reach only processes that the command has started.
    """
    supported = version()
    if not supported:
        return None
    with_scopes = scoped and supported >= _HAS_SCOPES
    attributes = struct.pack("=QQQ", _OF_FOLDERS, 0, _SCOPED if with_scopes else 0)
    size = len(attributes) if with_scopes else 8
    made = _call(_CREATE, attributes, ctypes.c_size_t(size), ctypes.c_uint(0))
    for path in paths:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            held = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rights = _OF_FOLDERS if os.path.isdir(path) else _OF_FILES
            try:
                rule = struct.pack("=Qi", rights, held)
                _call(_ADD, ctypes.c_int(made), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint(0))
            finally:
                os.close(held)
    return made


def restrict(made: int) -> None:
    """Applies the rules to this process and its later children. The process must have set PR_SET_NO_NEW_PRIVS."""
    _call(_RESTRICT, ctypes.c_int(made), ctypes.c_uint(0))


def forbid_writes(folders: Iterable[str]) -> bool:
    """Lets this process and its later children write only below `folders`, and returns True.

    Newer kernels also forbid TCP connections, and signals and abstract Unix sockets of other processes. Returns False
    without Landlock: then nothing is forbidden.
    """
    supported = version()
    if not supported:
        return False
    rights = _WRITES | (_REFER if supported >= 2 else 0) | (_TRUNCATE if supported >= 3 else 0)
    attributes = [
        rights,
        *([_TCP] if supported >= _HAS_TCP else []),
        *([_SCOPED] if supported >= _HAS_SCOPES else []),
    ]
    packed = struct.pack(f"={len(attributes)}Q", *attributes)
    made = _call(_CREATE, packed, ctypes.c_size_t(len(packed)), ctypes.c_uint(0))
    for path in folders:
        held = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = rights if os.path.isdir(path) else rights & (_WRITE_FILE | _TRUNCATE)
        rule = struct.pack("=Qi", allowed, held)
        _call(_ADD, ctypes.c_int(made), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint(0))
        os.close(held)
    if _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")
    restrict(made)
    os.close(made)
    return True


def allowed(folder: str, hidden: list[str], shown: list[str]) -> Iterator[str]:
    """Yields the paths that a command may read: the system's folders without `hidden`, `shown`, the sandbox's `folder`,
    the devices that every program needs, /proc, and the folder of semaphores."""
    covered = [os.path.realpath(path) for path in hidden]
    for path in SYSTEM:
        yield from _around(os.path.realpath(path), covered)
    yield from (*shown, folder, "/proc", SEMAPHORES, *(f"/dev/{name}" for name in DEVICES))


def _around(path: str, hidden: list[str]) -> Iterator[str]:
    """Yields `path`, or its allowed entries if a hidden path is below it, or nothing if `path` is hidden."""
    if path in hidden:
        return
    if not any(each.startswith(f"{path}/") for each in hidden):
        yield path
        return
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            yield from _around(f"{path}/{name}", hidden)
