"""Start: takes on the sandbox's user, leaves the host's namespaces where it may, and serves.

stdin is JSON of: `socket` (descriptor), `folder`, `uid` (the sandbox's own user, null for
this process's), `isolation` (auto, namespaces, processes), `network` (bool: keep the host's), `hidden`, `keep`,
`tmp_bytes`, `limits`. The first message on the socket is {"ready": isolation, "refused": why there are no namespaces}
or {"failed": why}.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import Any

from slime.agent.init import kernel, namespaces, processes
from slime.agent.init.serve import Owner

Settings = dict[str, Any]
Hides = tuple[str, list[str], list[str], int]


def start() -> None:
    settings: Settings = json.load(sys.stdin)
    channel = socket.socket(fileno=settings["socket"])
    refused = ""
    if settings["isolation"] != "processes":
        child, refused = _enter_namespaces(channel, settings)
        if not refused:
            channel.close()
            os.waitpid(child, 0)
            return
        os.waitpid(child, 0)
    if settings["isolation"] == "namespaces":
        channel.send(json.dumps({"failed": refused}).encode())
        return
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    channel.send(json.dumps({"ready": "processes", "refused": refused}).encode())
    Owner(channel, processes.Family(settings["uid"]), settings).run()


def _enter_namespaces(channel: socket.socket, settings: Settings) -> tuple[int, str]:
    """(child that waits for process 1, why the host refuses or "")."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        with os.fdopen(reader, encoding="utf-8") as pipe:
            return child, pipe.read()
    os.close(reader)
    try:
        hides = (settings["folder"], settings["hidden"], settings["keep"], settings["tmp_bytes"])
        done = settings["uid"] is not None and _hide_as_root(hides)
        _take_user(settings["uid"])
        namespaces.unshare(settings["network"])
        inner = os.fork()
        if inner == 0:
            _be_first(channel, settings, writer, None if done else hides)
        channel.close()
        os.close(writer)
        os.waitpid(inner, 0)
    except OSError as error:
        os.write(writer, str(error).encode())
    finally:
        os._exit(0)


def _take_user(uid: int | None) -> None:
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    # A process that changed its user may not write its own uid_map without this line.
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)


def _hide_as_root(hides: Hides) -> bool:
    """False where this root may not (a container without CAP_SYS_ADMIN)."""
    try:
        kernel.unshare(kernel.NEWNS)
    except PermissionError:
        return False
    namespaces.hide(*hides)
    return True


def _be_first(channel: socket.socket, settings: Settings, writer: int, hides: Hides | None) -> None:
    """Process 1 of the namespaces. The pipe closes without a word when all is in place."""
    try:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if hides:
            namespaces.hide(*hides)
        namespaces.seal(settings["folder"], settings["tmp_bytes"], settings["network"])
    except OSError as error:
        os.write(writer, str(error).encode())
        os._exit(1)
    try:
        os.close(writer)
        # The programs of the sandbox have no capabilities, so that they cannot look into this process.
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        channel.send(json.dumps({"ready": "namespaces", "refused": ""}).encode())
        Owner(channel, processes.Namespace(), {**settings, "uid": None}).run()
    finally:
        os._exit(0)
