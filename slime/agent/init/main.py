"""Start: takes on the sandbox's user, leaves the host's namespaces where it may, and serves.

stdin is JSON of: `socket` (descriptor), `folder`, `uid` (the sandbox's own user, null for
this process's), `isolation` (auto, namespaces, processes), `network` (bool: keep the host's), `hidden`, `shown`,
`tmp_bytes`, `limits`. The first message on the socket is {"ready": isolation, "refused": why there are no namespaces}
or {"failed": why}.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from typing import Any, NoReturn

from slime.agent.init import kernel, landlock, namespaces, processes
from slime.agent.init.memory_group import MemoryGroup
from slime.agent.init.serve import Owner

Settings = dict[str, Any]


def start() -> None:
    settings: Settings = json.load(sys.stdin)
    channel = socket.socket(fileno=settings["socket"])
    group = MemoryGroup.make(settings["limits"]["memory_bytes"])
    try:
        kernel.has_filters()
        _own(channel, settings, group)
    except OSError as error:
        channel.send(json.dumps({"failed": str(error)}).encode())
    finally:
        if group:
            group.remove()


def _own(channel: socket.socket, settings: Settings, group: MemoryGroup | None) -> None:
    refused = ""
    if settings["isolation"] != "processes":
        child, refused = _own_namespaces(channel, settings, group)
        if not refused:
            channel.close()
            os.waitpid(child, 0)
            return
        os.waitpid(child, 0)
    if settings["isolation"] == "namespaces":
        raise OSError(f"this host refuses namespaces to a sandbox ({refused}); use isolation='auto'")
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    places = landlock.allowed(settings["folder"], settings["hidden"], settings["shown"])
    # A sandbox with a user of its own reaches no process of another user. Its commands may signal each other.
    readable = landlock.ruleset(places, scoped=settings["uid"] is None)
    outside = {**settings, "memory_files": (), "readable": readable}
    owner = Owner(channel, processes.Family(settings["uid"]), outside, group)
    if refused:
        files = "are in view: the kernel has no Landlock" if readable is None else "are hidden by Landlock"
        refused = f"{refused}; files outside the system's folders {files}"
    channel.send(json.dumps({"ready": "processes", "refused": refused}).encode())
    owner.run()


def _own_namespaces(channel: socket.socket, settings: Settings, group: MemoryGroup | None) -> tuple[int, str]:
    """(child that owns a sandbox with namespaces, why the host refuses them or "")."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        with os.fdopen(reader, encoding="utf-8") as pipe:
            return child, pipe.read()
    os.close(reader)
    try:
        world = _enter_namespaces(settings, [channel.fileno(), writer])
        inside = {**settings, "uid": None, "memory_files": namespaces.SCRATCH, "readable": None}
        owner = Owner(channel, world, inside, group)
        os.close(writer)
        channel.send(json.dumps({"ready": "namespaces", "refused": ""}).encode())
        owner.run()
        world.end()
    except OSError as error:
        # After the start nobody reads the pipe, which is closed.
        with contextlib.suppress(OSError):
            os.write(writer, str(error).encode())
    finally:
        os._exit(0)


def _enter_namespaces(settings: Settings, inherited: list[int]) -> processes.Namespace:
    """Enters every namespace of the sandbox but the one of its processes, in which this process starts children.

    No process of the sandbox has a number for its owner, so no signal, limit or priority reaches the owner.
    """
    hides = (settings["folder"], settings["hidden"], settings["shown"], settings["tmp_bytes"])
    done = settings["uid"] is not None and _unshared_mounts()
    if done:
        namespaces.hide(*hides)
    _take_user(settings["uid"])
    namespaces.unshare(settings["network"])
    if not done:
        namespaces.hide(*hides)
    reader, writer = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(reader)
        _be_first(settings, writer, inherited)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as pipe:
        if failed := pipe.read():
            raise OSError(failed)
    os.chdir(settings["folder"])
    return processes.Namespace(first)


def _take_user(uid: int | None) -> None:
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    # A process that changed its user may not write its own uid_map without this line.
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)


def _unshared_mounts() -> bool:
    """False where this root may not (a container without CAP_SYS_ADMIN)."""
    try:
        kernel.unshare(kernel.NEWNS)
    except PermissionError:
        return False
    return True


def _be_first(settings: Settings, writer: int, inherited: list[int]) -> NoReturn:
    """Runs as process 1 of the namespace, and takes the processes whose parents have ended. The pipe closes without a
    word when the namespaces are ready."""
    try:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        for descriptor in inherited:
            os.close(descriptor)
        namespaces.seal(settings["folder"], settings["network"])
        # The programs of the sandbox have no capabilities, so that they cannot look into this process.
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        # A signal with a handler would reach process 1; Python has one for SIGINT.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        os.close(writer)
        while True:
            signal.sigwait([signal.SIGCHLD])
            processes.reap()
            processes.ended.clear()
    except OSError as error:
        os.write(writer, str(error).encode())
    finally:
        os._exit(1)
