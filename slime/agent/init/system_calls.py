"""Makes the filter of system calls (seccomp) for a sandbox's commands, as a BPF program for x86-64 and arm64.

The calls that it refuses hold memory that no limit of a process counts, open parts of the kernel that programs do not
need, or change another process's limits.
"""

from __future__ import annotations

import errno
import platform
import struct
from dataclasses import dataclass

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_LOAD, _EQUAL, _ANY_BIT, _GREATER_EQUAL, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_X32 = 0x40000000
_SOL_SOCKET = 1
_FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK."""
_PROTOCOLS = (0, 1, 6, 17, 58)
"""The default, ICMP, TCP, UDP, ICMPv6."""
_BUFFER_SIZES = (7, 8, 32, 33)
"""SO_SNDBUF, SO_RCVBUF, and both with FORCE."""
_F_SETPIPE_SZ = 1031
_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""

_MISSING = (
    # Memory that belongs to no process: files in memory, System V's and POSIX's objects, io_uring's buffers, pages of
    # closed mappings that a pipe holds. A program gets the error of a kernel without the call.
    *((319, 279), (447, 447), (29, 194), (30, 196), (31, 195), (68, 186), (64, 190), (240, 180)),
    *((425, 425), (426, 426), (427, 427), (278, 75)),
    # userfaultfd, perf_event_open, bpf, the three of the kernel's key rings, fanotify_init, open_by_handle_at
    *((323, 282), (298, 241), (321, 280), (248, 217), (249, 218), (250, 219), (300, 262), (304, 265)),
    # clone3, whose flags a filter cannot read. The C library then calls clone.
    (435, 435),
)


@dataclass(frozen=True)
class Rule:
    """A call with these arguments returns the error; 0 is success without effect."""

    numbers: tuple[int, int]
    """The call's numbers on x86-64 and arm64."""
    error: int
    tests: tuple[tuple[int, int, tuple[int, ...]], ...]
    """(argument, jump, values): each test must hold for one of its values."""
    unless: bool = False
    """The error is for other arguments than these."""


_RULES = (
    # prlimit64 of another process than the caller
    Rule((302, 261), errno.EPERM, ((0, _EQUAL, (0,)),), unless=True),
    # socket: families and protocols whose memory is counted
    Rule(
        (41, 198),
        errno.EAFNOSUPPORT,
        ((0, _EQUAL, _FAMILIES), (2, _EQUAL, _PROTOCOLS)),
        unless=True,
    ),
    # setsockopt: a socket's buffers keep their sizes
    Rule((54, 208), 0, ((1, _EQUAL, (_SOL_SOCKET,)), (2, _EQUAL, _BUFFER_SIZES))),
    # fcntl: a pipe keeps its size
    Rule((72, 25), errno.EPERM, ((1, _EQUAL, (_F_SETPIPE_SZ,)),)),
    # setpriority of all processes of the user; and of process 1, which may have the commands' user, with its siblings
    # ioprio_set, sched_setscheduler, sched_setparam, sched_setattr and sched_setaffinity
    Rule((141, 140), errno.EPERM, ((0, _EQUAL, (2,)),)),
    *(Rule(numbers, errno.EPERM, ((1, _EQUAL, (1,)),)) for numbers in ((141, 140), (251, 30))),
    *(
        Rule(numbers, errno.EPERM, ((0, _EQUAL, (1,)),))
        for numbers in ((144, 119), (142, 118), (314, 274), (203, 122))
    ),
    # prctl(PR_SET_DUMPABLE): a process would hide its descriptors from the watch
    Rule((157, 167), 0, ((0, _EQUAL, (4,)),)),
    # clone and unshare: no namespaces
    Rule((56, 220), errno.EPERM, ((0, _ANY_BIT, (_NAMESPACES,)),)),
    Rule((272, 97), errno.EPERM, ((0, _ANY_BIT, (_NAMESPACES,)),)),
)


def program() -> bytes:
    """Returns the filter for this machine. Raises OSError if its processor is neither of the two."""
    if platform.machine() not in _ARCHITECTURES:
        raise OSError(f"a sandbox must run on x86_64 or aarch64, got {platform.machine()}; use another host")
    which, architecture = _ARCHITECTURES[platform.machine()]
    code = [
        _line(_LOAD, _ARCHITECTURE_AT),
        # A program of another architecture has other numbers.
        _line(_EQUAL, architecture, 1, 0),
        _line(_RETURN, _KILL),
        _line(_LOAD, _NUMBER_AT),
    ]
    if which == 0:
        code += [_line(_GREATER_EQUAL, _X32, 0, 1), _line(_RETURN, _ERRNO | errno.ENOSYS)]
    for numbers in _MISSING:
        code += [_line(_EQUAL, numbers[which], 0, 1), _line(_RETURN, _ERRNO | errno.ENOSYS)]
    for rule in _RULES:
        body = _body(rule)
        code += [_line(_EQUAL, rule.numbers[which], 0, len(body)), *body]
    return b"".join([*code, _line(_RETURN, _ALLOW)])


def _body(rule: Rule) -> list[bytes]:
    """Returns the lines that decide a call whose number is the rule's."""
    met, other = _line(_RETURN, _ERRNO | rule.error), _line(_RETURN, _ALLOW)
    if rule.unless:
        met, other = other, met
    body = [met]
    for argument, jump, values in reversed(rule.tests):
        # A hit goes over the other values and the return that follows them.
        tests = [_line(jump, value, len(values) - position, 0) for position, value in enumerate(values)]
        body = [_line(_LOAD, _ARGUMENTS_AT + 8 * argument), *tests, other, *body]
    return body


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
