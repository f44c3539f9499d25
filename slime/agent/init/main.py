"""The first process of a sandbox: process 1 in bubblewrap's namespaces, or a plain process without them.

stdin is JSON of: `socket` (descriptor), `folder`, `uid` (the user of commands, null for this process's), `isolation`
(namespaces or processes), `network` (bool: the host's), `hidden`, `shown`, `limits`, `group` (descriptors of a memory
group, or null). The first message on the socket is {"ready": isolation, "landlock": bool} or {"failed": why}.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

from slime.agent.init import bubblewrap, kernel, landlock
from slime.agent.init.memory_group import Members
from slime.agent.init.serve import Owner

Settings = dict[str, Any]
_TCP_BUFFERS = "4096 65536 106496"


def start() -> None:
    settings: Settings = json.load(sys.stdin)
    channel = socket.socket(fileno=settings["socket"])
    readable = None
    try:
        kernel.has_filters()
        if settings["isolation"] == "namespaces":
            seal(not settings["network"])
        else:
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
            paths = landlock.allowed(settings["folder"], settings["hidden"], settings["shown"])
            # A sandbox with a separate user reaches no process of another user. Its commands may signal each other.
            readable = landlock.ruleset(paths, scoped=settings["uid"] is None)
        group = Members(*settings["group"]) if settings["group"] else None
        scratch = bubblewrap.SCRATCH if settings["isolation"] == "namespaces" else ()
        owner = Owner(channel, {**settings, "memory_files": scratch, "readable": readable}, group)
    except OSError as error:
        channel.send(json.dumps({"failed": str(error)}).encode())
        return
    message = {"ready": settings["isolation"], "landlock": readable is not None}
    channel.send(json.dumps(message).encode())
    owner.run()


def seal(own_network: bool) -> None:
    """Keeps commands of the same user out of process 1, and bounds the memory of TCP sockets.

    Raises OSError if the host gives this process no rights over its own network."""
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    if own_network:
        # With these sizes, the two buffers of a TCP socket hold at most SOCKET_BYTES.
        for name in ("tcp_rmem", "tcp_wmem"):
            Path(f"/proc/sys/net/ipv4/{name}").write_text(_TCP_BUFFERS, encoding="utf-8")
