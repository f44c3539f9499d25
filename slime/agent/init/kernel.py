"""The system calls that Python 3.11 has no function for. Linux, x86-64 and arm64."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import socket
import struct

NEWNS, NEWUTS, NEWIPC = 0x00020000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
NOSUID, NODEV, NOEXEC, BIND, REC, PRIVATE = 2, 4, 8, 0x1000, 0x4000, 1 << 18
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
_PR_GET_SECCOMP, _PR_SET_SECCOMP, _FILTER = 21, 22, 2
_PR_CAPBSET_DROP, _LAST_CAPABILITY = 24, 63
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY = 442, -100, 0x8000, 1
_PIVOT_ROOT, _MNT_DETACH = {"x86_64": 155, "aarch64": 41}, 2
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(what: str, returned: int) -> None:
    if returned < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    _checked("unshare", _libc.unshare(ctypes.c_int(flags)))


def prctl(option: int, value: int) -> None:
    _checked(f"prctl {option}", _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def drop_capabilities() -> None:
    """What this process executes gets none, even as root. Without effect, and without need, where it has none."""
    for capability in range(_LAST_CAPABILITY + 1):
        with contextlib.suppress(OSError):
            prctl(_PR_CAPBSET_DROP, capability)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_char_p))


def has_filters() -> None:
    """Raises OSError if the kernel has no filters of system calls."""
    prctl(_PR_GET_SECCOMP, 0)


def filter_calls(program: bytes) -> None:
    """Binds this process and its later children by the BPF program. Needs PR_SET_NO_NEW_PRIVS."""
    filled = _Program(len(program) // 8, program)
    _checked("seccomp", _libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_FILTER), ctypes.byref(filled), 0, 0))


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    _checked(
        f"mount {target}",
        _libc.mount(
            source.encode(),
            target.encode(),
            kind.encode() or None,
            ctypes.c_ulong(flags),
            data.encode() or None,
        ),
    )


def bind(source: str, target: str) -> None:
    """Shows the file or folder `source`, with the mounts below it, at `target`."""
    mount(source, target, "", BIND | REC)


def bind_descriptor(descriptor: int, target: str) -> None:
    """Shows the folder of an O_PATH descriptor at `target`, without the mounts below it."""
    mount(f"/proc/self/fd/{descriptor}", target, "", BIND)


def change_root(new: str) -> None:
    """Makes the mount at `new` the root of every process of this mount namespace, and detaches the old root."""
    os.chdir(new)
    number = _PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise OSError(
            f"a sandbox with namespaces must run on x86_64 or aarch64, got {platform.machine()}; use another host"
        )
    _checked("pivot_root", _libc.syscall(ctypes.c_long(number), b".", b"."))
    _checked("umount2", _libc.umount2(b".", _MNT_DETACH))
    os.chdir("/")


def set_read_only(path: str, on: bool, *, recursive: bool = False) -> None:
    """Of the mount at `path`; `recursive`: of all mounts below it, too. Needs Linux 5.12."""
    attributes = struct.pack("=QQQQ", _ATTR_RDONLY if on else 0, 0 if on else _ATTR_RDONLY, 0, 0)
    _checked(
        f"mount_setattr {path}",
        _libc.syscall(
            ctypes.c_long(_MOUNT_SETATTR),
            ctypes.c_int(_AT_FDCWD),
            path.encode(),
            ctypes.c_uint(_AT_RECURSIVE if recursive else 0),
            attributes,
            ctypes.c_size_t(len(attributes)),
        ),
    )


def loopback_up() -> None:
    """Switch the loopback interface of this network namespace on."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        request = struct.pack("16sh22x", b"lo", 0)
        name, flags = struct.unpack("16sh22x", fcntl.ioctl(handle, _SIOCGIFFLAGS, request))
        fcntl.ioctl(handle, _SIOCSIFFLAGS, struct.pack("16sh22x", name, flags | _IFF_UP))
