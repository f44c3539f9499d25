"""Finds the user that owns the socket that listens at an address of this host, as the kernel reports it."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

_SOCK_DIAG, _BY_FAMILY = 4, 20  # NETLINK_SOCK_DIAG and SOCK_DIAG_BY_FAMILY of Linux's headers
_REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_ERROR, _DONE = 2, 3
_LISTEN = 10  # TCP_LISTEN
_HEADER = struct.Struct("=IHHII")


@dataclass(frozen=True)
class Listener:
    """A listening TCP socket. `host` is the numeric address that it was bound to, and `inode` its inode number."""

    host: str
    port: int
    uid: int
    inode: int


def listeners(port: int) -> list[Listener]:
    """Returns all TCP sockets of this network namespace that listen at `port`, at any address."""
    families = [socket.AF_INET, *([socket.AF_INET6] if socket.has_ipv6 else [])]
    try:
        return [each for family in families for each in _request_listeners(family, port)]
    except OSError:  # kernels without INET_DIAG and gVisor have the slower table
        table = [*_read("/proc/net/tcp"), *_read("/proc/net/tcp6")]
        return [each for each in table if each.port == port]


def listening_at(host: str, port: int) -> list[Listener]:
    """Returns the sockets that a connection to the numeric address `host` of this host may reach.

    A socket that is bound to this address has priority over sockets that are bound to all addresses.
    """
    found = listeners(port)
    return [each for each in found if each.host == host] or [
        each for each in found if ip_address(each.host).is_unspecified
    ]


def _request_listeners(family: socket.AddressFamily, wanted: int) -> Iterator[Listener]:
    """Yields the kernel's answer to a request for the listening sockets of a family at the port `wanted`."""
    size = 4 if family == socket.AF_INET else 16
    asked = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, 1 << _LISTEN)
    asked += struct.pack(">H", wanted) + bytes(46)  # the kernel leaves out other ports
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as netlink:
        netlink.send(_HEADER.pack(_HEADER.size + len(asked), _BY_FAMILY, _REQUEST_DUMP, 1, 0) + asked)
        while True:
            left = memoryview(netlink.recv(1 << 16))
            while left:
                length, kind, *_ = _HEADER.unpack_from(left)
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    raise OSError(-struct.unpack_from("=i", left, _HEADER.size)[0], "NETLINK_SOCK_DIAG")
                row = left[_HEADER.size : length]  # struct inet_diag_msg
                (port,) = struct.unpack_from(">H", row, 4)
                uid, inode = struct.unpack_from("=II", row, 64)
                yield Listener(socket.inet_ntop(family, row[8 : 8 + size]), port, uid, inode)
                left = left[(length + 3) & ~3 :]


def _read(path: str) -> Iterator[Listener]:
    """Yields the rows of listening sockets in a table of /proc/net, whose addresses are words in the host's byte
    order."""
    if not os.path.exists(path):
        return
    for line in Path(path).read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        if int(fields[3], 16) != _LISTEN:
            continue
        digits, _, port = fields[1].partition(":")
        words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
        family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
        host = socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
        yield Listener(host, int(port, 16), int(fields[7]), int(fields[9]))
