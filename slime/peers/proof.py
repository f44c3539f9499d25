"""Proves that a server belongs to the run before it gets the run's key.

On its own host, the kernel's table is the proof: the socket that listens at the address belongs to the user of this
process or to root. Every other server answers a challenge with the HMAC, under the run's key, of random bytes and of
the address at which it was reached. A stranger cannot forward the challenge to a server of the run, because that server
has another address. The key itself is never sent for a proof.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import socket
import time
from collections.abc import Collection
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from slime.peers.listeners import Listener, listening_at

logger = logging.getLogger(__name__)
PROOF_PATH = "/vime_proof"
"""Route for GET with ?challenge=HEX, the only route that the servers of a run answer without the key."""
CHALLENGE_BYTES = 32
ANSWER_S = 5.0
_MOST_BYTES = 4096
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_warned: set[str] = set()


class NotProvenError(ConnectionError):
    """Raised if the server at an address is not the run's, or cannot prove that it is. The key was not sent to it."""


def proof(run_key: str, challenge: str, host: str, port: int) -> str:
    """Returns the answer of the server that was reached at the numeric address `host` and at `port`.

    Raises ValueError for a challenge that is not CHALLENGE_BYTES in hexadecimal digits.
    """
    if len(challenge) != 2 * CHALLENGE_BYTES or len(bytes.fromhex(challenge)) != CHALLENGE_BYTES:
        raise ValueError(
            f"challenge must have {2 * CHALLENGE_BYTES} hexadecimal digits, got {len(challenge)} characters; send "
            f"{CHALLENGE_BYTES} random bytes"
        )
    address = _plain(host)
    if ip_address(address).is_loopback:  # each host has this address
        address += "\n" + _BOOT_ID.read_text(encoding="ascii")
    message = f"proof of a server\n{challenge.lower()}\n{address}\n{port}"
    return hmac.new(run_key.encode(), message.encode(), hashlib.sha256).hexdigest()


def require_proof(
    own: str,
    peer: str,
    port: int,
    run_key: str,
    before: Collection[Listener],
    *,
    held: bool = False,
    timeout_s: float = ANSWER_S,
) -> None:
    """Raises NotProvenError unless the server of a connection from the address `own` to `peer` and `port` may get the
    key, which is not sent here.

    `before` has the `listeners` of the port before the connection was made. `held` means that a process of this run on
    the host of `peer` has proved the server, and holds the port against other users. Then only a server on this host is
    checked.
    """
    host = _plain(peer)
    stranger = "a server on another host"
    if ip_address(host).is_loopback or host == _plain(own):
        found = listening_at(host, port)
        if found and all(each.uid in (os.geteuid(), 0) and each in before for each in found):
            return
        stranger = " and ".join(f"a process of user {each.uid}" for each in found) or "a port that was closed"
    elif held:
        return
    if _answers(host, port, run_key, timeout_s):
        return
    message = (
        f"the server at {host}:{port} must prove that it is this run's, got {stranger} without the run's key, which "
        "was not sent; end that server, start it with the key of the run, or use another address"
    )
    if message not in _warned:
        _warned.add(message)
        logger.warning("%s", message)
    raise NotProvenError(message)


def strangers_at(host: str, port: int) -> list[int]:
    """Returns the ids of users, other than this user and root, whose sockets listen at an address of this host.

    The list is empty for other hosts, whose sockets this kernel does not list.
    """
    family, _, _, _, peer = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(peer)  # sends nothing
        own = probe.getsockname()[0]
    address = _plain(str(peer[0]))
    if not ip_address(address).is_loopback and address != _plain(own):
        return []
    return sorted({each.uid for each in listening_at(address, port)} - {os.geteuid(), 0})


def is_strangers(host: str, port: int, run_key: str) -> bool:
    """Returns True if the server at an address of this host belongs to another user and does not have the key. Returns
    False for other hosts."""
    if not strangers_at(host, port):
        return False
    address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    return not _answers(_plain(address), port, run_key, ANSWER_S)


def _answers(host: str, port: int, run_key: str, timeout_s: float) -> bool:
    """Returns True if the server at an address answers a challenge in time, whatever else it sends."""
    challenge, end = secrets.token_hex(CHALLENGE_BYTES), time.monotonic() + timeout_s
    right = proof(run_key, challenge, host, port).encode()
    name = f"[{host}]" if ":" in host else host
    asked = (
        f"GET {PROOF_PATH}?challenge={challenge} HTTP/1.1\r\nHost: {name}:{port}\r\nConnection: close\r\n\r\n"
    )
    message = b""
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            connection.sendall(asked.encode())
            while (
                right not in message and len(message) < _MOST_BYTES and (left_s := end - time.monotonic()) > 0
            ):
                connection.settimeout(left_s)
                if not (piece := connection.recv(_MOST_BYTES)):
                    break
                message += piece
    except OSError:
        return False
    return right in message


def _plain(host: str) -> str:
    """Returns a numeric address in one spelling: an IPv4 address that an IPv6 socket shows becomes that IPv4
    address."""
    address = ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)
