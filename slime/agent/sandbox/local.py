"""Runs a sandbox on this host: in a folder, as a separate user if this process is root, and in bubblewrap if the host
has it.

docs/security.md lists the attacks that a sandbox prevents, and those that it does not prevent.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self

from slime.agent.init import bubblewrap
from slime.agent.init.memory_group import MemoryGroup
from slime.agent.sandbox import paths
from slime.agent.sandbox.channel import CommandOutput, Message, SandboxChannel, all_read
from slime.agent.sandbox.environment import environment
from slime.agent.sandbox.forward import Forwarder
from slime.agent.sandbox.left import MARKER, delete, delete_user_files, sweep
from slime.agent.sandbox.protocol import (
    ExecResult,
    FileContent,
    Limits,
    Reason,
    SandboxError,
    checked,
)
from slime.agent.sandbox.users import closed_parent, free_user
from slime.records.once import warn_once

logger = logging.getLogger(__name__)

Isolation = Literal["auto", "namespaces", "processes"]
Network = Literal["none", "loopback", "host"]
_START_S, _GRACE_S, _END_S = 60.0, 0.3, 30.0


class LocalSandbox:
    """Runs a model's commands on this host: `async with LocalSandbox() as sandbox: await sandbox.exec("ls")`.

    `isolation`: "namespaces" uses bubblewrap, and fails if the host lacks or refuses it. "processes" uses no
    bubblewrap. "auto" (the default) uses bubblewrap if possible, and otherwise logs a warning once.
    `network`: "none", "loopback" (`allow_loopback` opens single ports of this host's loopback), or "host". Without
    namespaces, every sandbox has the host's network.
    `folder`: the folder in which the sandbox's folder is made. Other users must be able to enter it.
    `show`, `hide`: with namespaces or Landlock, a sandbox sees the system's folders (such as /usr, /etc and /opt), the
    Python of this process and the sandbox's folder. `show` adds files and folders of the host, which are read-only with
    namespaces. `hide` removes files and folders.
    `slots`: a semaphore that bounds the number of sandboxes that run at a time.

    A file's path is absolute below `folder`, or relative to `workdir`. All commands run as the same user; the argument
    `user` has no effect.
    """

    single_user = True

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        isolation: Isolation = "auto",
        network: Network = "none",
        folder: str | Path | None = None,
        show: tuple[str | Path, ...] = (),
        hide: tuple[str | Path, ...] = (),
        slots: asyncio.Semaphore | None = None,
    ) -> None:
        self.limits, self.network, self.slots = limits or Limits(), network, slots
        self.isolation: str = isolation
        """After the start: "namespaces" or "processes"."""
        self.sandbox_id = f"local-{secrets.token_hex(8)}"
        self.folder = self.workdir = self.home = ""
        self._show, self._hide, self._parent = show, hide, folder
        self._user = free_user()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: SandboxChannel | None = None
        self._group: MemoryGroup | None = None
        self._forwarders: dict[int, Forwarder] = {}

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Starts the sandbox's process. Raises SandboxError if the process cannot start."""
        if self.slots:
            await self.slots.acquire()
        try:
            way = bubblewrap.Way(refused="the caller wants none")
            if self.isolation != "processes":
                way = await asyncio.to_thread(bubblewrap.way, self._user is not None)
            if way.refused and self.isolation == "namespaces":
                raise SandboxError(
                    f"this host refuses namespaces to a sandbox ({way.refused}); use isolation='auto'"
                )
            if way.refused and self._user is not None:
                self._check_parent()
            self._make_folder()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = await asyncio.to_thread(self._launch, theirs, way)
            self._channel = SandboxChannel(ours)
            message = await asyncio.wait_for(self._channel.first, _START_S)
            if "failed" in message:
                raise SandboxError(f"the sandbox cannot start: {message['failed']}")
        except BaseException:
            await self.close()
            raise
        if way.refused and self.isolation == "auto":
            _warn_once(way.refused, message["landlock"])
        self.isolation = message["ready"]

    def _check_parent(self) -> None:
        """Raises SandboxError if the sandbox's user may not enter the folder in which its folder is made. Each command
        would fail."""
        folder = self._parent or tempfile.gettempdir()
        if closed := closed_parent(folder):
            raise SandboxError(
                f"the folder of a sandbox must lie where other users may enter, got {folder}, and {closed} is closed "
                f"to them; choose another folder, or allow it: chmod o+x {closed}"
            )

    def _make_folder(self) -> None:
        # The path is resolved, because the sandbox sees real paths only.
        self.folder = os.path.realpath(tempfile.mkdtemp(prefix="vime-sandbox-", dir=self._parent))
        self.workdir, self.home = f"{self.folder}/work", f"{self.folder}/home"
        for directory in (self.workdir, self.home, f"{self.folder}/tmp"):
            os.mkdir(directory, 0o700)
        if self._user is not None:
            for directory in (self.workdir, self.home, f"{self.folder}/tmp", self.folder):
                os.chown(directory, self._user, self._user)

    def _launch(self, theirs: socket.socket, way: bubblewrap.Way) -> subprocess.Popen[bytes]:
        shown = [os.path.abspath(directory) for directory in (sys.prefix, sys.base_prefix, *self._show)]
        hidden = [os.path.abspath(directory) for directory in self._hide]
        self._group = MemoryGroup.make(self.limits.memory_bytes)
        descriptors = self._group.descriptors if self._group else []
        namespaces, user = not way.refused, self._user
        if namespaces and not way.as_root:
            user = None  # bwrap itself runs as this user.
        settings = {
            "socket": theirs.fileno(),
            "folder": self.folder,
            "uid": user,
            "isolation": "namespaces" if namespaces else "processes",
            "network": self.network == "host",
            "hidden": hidden,
            "shown": shown,
            "limits": asdict(self.limits),
            "group": descriptors,
        }
        source = bubblewrap.code_folder(namespaces)
        words = bubblewrap.python(
            f"import sys; sys.path.insert(0, {source!r}); from slime.agent.init.main import start; start()"
        )
        if namespaces:
            host_network = self.network == "host"
            view = bubblewrap.View(
                self.folder, tuple(hidden), tuple(shown), self.limits.tmp_bytes, host_network
            )
            words = [*bubblewrap.command(view, way.as_root), *words]
        changed = None if user == self._user else self._user
        with _make_memory_file(json.dumps(settings)) as stdin:
            process: subprocess.Popen[bytes] = subprocess.Popen(
                words,
                pass_fds=[theirs.fileno(), *descriptors],
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                env={"PATH": os.defpath},
                user=changed,
                group=changed,
                extra_groups=None if changed is None else [],
            )
        if self._group:
            self._group.close()
        return process

    async def close(self) -> None:
        """Ends every process of the sandbox and deletes its folder. Callers may repeat the call."""
        for forwarder in self._forwarders.values():
            forwarder.close()
        self._forwarders.clear()
        process, self._process = self._process, None
        channel, self._channel = self._channel, None
        try:
            if channel:
                channel.close()
            if process:
                await asyncio.shield(asyncio.to_thread(self._end, process))
        finally:
            if process and self.slots:
                self.slots.release()
            folder, self.folder = self.folder, ""
            if folder:
                await asyncio.shield(asyncio.to_thread(delete, folder))

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self.isolation != "namespaces":
            sweep(self.sandbox_id)
            if self._user is not None:
                delete_user_files(self._user)
        group, self._group = self._group, None
        if group:
            group.remove()

    async def exec(
        self,
        cmd: str,
        *,
        user: str = "root",
        env: dict[str, str] | None = None,
        timeout: float = 120,
        check: bool = False,
        cwd: str | None = None,
        stdin: str | bytes | socket.socket | None = None,
    ) -> ExecResult:
        """Runs a command as `protocol.Sandbox.exec` describes. The shell is bash if the host has it, else sh. This
        process closes a socket that is given as `stdin`, so that the socket's other end detects when the command ends.

        A limit of the whole sandbox (memory, processes, disk, files) ends all its processes. Time and output end the
        command and its children, unless a child left the command's session. Raises SandboxError if the sandbox is not
        running or ends during the command.
        """
        if self._channel is None:
            raise SandboxError(
                "the sandbox must run before it is used, got a closed one; use `async with`, or call start()"
            )
        directory = "/".join([self.folder, *paths.split_path(self.folder, self.workdir, cwd or ".")])
        variables = {**environment(self.home, f"{self.folder}/tmp"), MARKER: self.sandbox_id, **(env or {})}
        output = CommandOutput(self.limits.output_bytes)
        writers: list[int] = []
        try:
            with stdin if isinstance(stdin, socket.socket) else _make_memory_file(stdin) as source:
                writers.append(os.dup(source.fileno()))
            out_end, out = await output.pipe()
            writers.append(out_end)
            error_end, err = await output.pipe()
            writers.append(error_end)
            number, reply = self._channel.ask("exec", writers, argv=_shell(cmd), env=variables, cwd=directory)
        finally:
            for writer in writers:
                os.close(writer)
        try:
            message = await self._reply(number, reply, output, timeout)
            try:
                await asyncio.wait_for(all_read(out, err), _GRACE_S)
            except TimeoutError:  # A process in the background may hold the pipes for as long as it likes.
                out.read_present()
                err.read_present()
        finally:
            out.transport.close()
            err.transport.close()
        if "failed" in message:
            raise SandboxError(
                f"the sandbox cannot start a command: {message['failed']}; start another sandbox"
            )
        reason = message["reason"] or _find_reason(message["code"])
        return checked(
            ExecResult(message["code"], out.text(), err.text(), reason, output.truncated), cmd, check
        )

    async def _reply(
        self, number: int, reply: asyncio.Future[Message], output: CommandOutput, timeout: float
    ) -> Message:
        assert self._channel is not None
        channel = self._channel
        full: asyncio.Future[Any] = asyncio.ensure_future(output.full.wait())
        try:
            await asyncio.wait([reply, full], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not reply.done():
                channel.kill(number, "output" if full.done() else "time")
                await asyncio.wait([reply], timeout=_END_S)
            if not reply.done():
                await self.close()
                raise SandboxError(
                    f"a command did not end within {_END_S:g} s of its kill; start another sandbox"
                )
            return reply.result()
        except asyncio.CancelledError:
            if not channel.closed:
                channel.kill(number, "time")
            raise
        finally:
            full.cancel()

    async def allow_loopback(self, port: int) -> None:
        """Forwards 127.0.0.1:`port` in the sandbox to the same port of this host's loopback. The rest of the network
        stays unreachable. Raises ValueError with network="none"."""
        if self.network == "none":
            raise ValueError(
                'the sandbox must have network="loopback" to reach a port of this host, got "none"; make it with that'
            )
        if self.network == "host" or self.isolation != "namespaces" or port in self._forwarders:
            return
        if self._channel is None:
            raise SandboxError(
                "the sandbox must run before it is used, got a closed one; use `async with`, or call start()"
            )
        _, reply = self._channel.ask("listen", port=port)
        message = await reply
        if "failed" in message:
            raise SandboxError(
                f"the sandbox cannot listen: {message['failed']}; end its program that holds the port"
            )
        self._forwarders[port] = await Forwarder.start(message["descriptors"][0], port)

    def _parts(self, sandbox_path: str) -> list[str]:
        if not self.folder:
            raise SandboxError(
                "the sandbox must run before it is used, got a closed one; use `async with`, or call start()"
            )
        parts = paths.split_path(self.folder, self.workdir, sandbox_path)
        if not parts:
            raise ValueError(f"a file in the sandbox must have a name, got {sandbox_path!r}; add it")
        return parts

    async def write_file(self, sandbox_path: str, content: FileContent, *, user: str = "root") -> None:
        """Writes a file as `protocol.Sandbox.write_file` describes."""
        parts = self._parts(sandbox_path)
        await asyncio.to_thread(paths.write, self.folder, parts, content, self._user)

    async def read_file(self, sandbox_path: str, *, user: str = "root") -> str:
        """Reads a file; see protocol.Sandbox. Also raises ValueError beyond the limit of a command's output."""
        try:
            return (await self.read_bytes(sandbox_path)).decode(errors="replace")
        except FileNotFoundError:
            return ""

    async def read_bytes(self, sandbox_path: str) -> bytes:
        """Returns the bytes of a file. Raises FileNotFoundError if the file does not exist."""
        parts = self._parts(sandbox_path)
        return await asyncio.to_thread(paths.read, self.folder, parts, self.limits.output_bytes)

    async def upload(self, source: Path, sandbox_path: str = ".") -> None:
        """Copies a folder of this host into a folder of the sandbox."""
        parts = paths.split_path(self.folder, self.workdir, sandbox_path)
        await asyncio.to_thread(paths.upload, self.folder, parts, source, self._user)

    async def download(self, sandbox_path: str, target: Path) -> int:
        """Copies the regular files below a folder of the sandbox to `target`, and returns their number."""
        parts = paths.split_path(self.folder, self.workdir, sandbox_path)
        return await asyncio.to_thread(paths.download, self.folder, parts, target, self.limits.disk_bytes)


def _make_memory_file(content: str | bytes | None) -> BinaryIO:
    """Returns a file in memory, at its start, which nobody can change. A file that grows would be memory without a
    limit."""
    file = os.fdopen(os.memfd_create("data", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b")
    file.write(content.encode() if isinstance(content, str) else content or b"")
    file.seek(0)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def _shell(cmd: str) -> list[str]:
    return ["/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh", "-c", cmd]


def _find_reason(code: int) -> Reason:
    reasons: dict[int, Reason] = {128 + signal.SIGXCPU: "cpu", 128 + signal.SIGXFSZ: "file size"}
    return reasons.get(code, "")


def _warn_once(refused: str, landlock: bool) -> None:
    files = (
        "Landlock hides files outside the system's folders" if landlock else "files of the host are in view"
    )
    message = (
        "sandboxes of this host run without bubblewrap, so with its network and its processes in view; %s (%s); "
        "see docs/security.md"
    )
    warn_once(logger, f"namespaces: {refused}", message, files, refused)
