"""Starts the commands of a sandbox, enforces the limits and ends the commands.

A request is one byte with descriptors. The first descriptor is a file of JSON: {"op": "exec", "id", "argv", "env",
"cwd"}, which is followed by the descriptors of stdin, stdout and stderr, or {"op": "kill", "id", "reason"}, or {"op":
"listen", "id", "port"}. When the socket closes, also because the process at its other end died, all processes are
killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
from dataclasses import dataclass
from typing import Any

from slime.agent.init import kernel, landlock, processes, system_calls
from slime.agent.init.disk import DiskWatch
from slime.agent.init.memory_group import Members

_TICK_S = 0.05
_FD_LIMIT = 4096
_SPARE_TASKS = 256
"""Number of tasks that the user may start outside the sandbox while a command runs, if the sandbox shares the user."""


@dataclass
class Command:
    number: int
    reason: str = ""


class Owner:
    """Serves requests until the socket closes. It uses one thread, so that a fork is safe."""

    def __init__(
        self,
        channel: socket.socket,
        settings: dict[str, Any],
        group: Members | None,
    ) -> None:
        self.channel, self.group = channel, group
        self.readable: int | None = settings["readable"]
        """Landlock's descriptor with the paths that commands may read. None without Landlock, and with namespaces,
        which need no Landlock."""
        self.memory_files: tuple[str, ...] = settings["memory_files"]
        self._kills, self._filter = 0, system_calls.program()
        self.folder: str = settings["folder"]
        self.uid: int | None = settings["uid"]
        self.limits: dict[str, int | None] = settings["limits"]
        self.namespaces = settings["isolation"] == "namespaces"
        shared = settings["network"] or not self.namespaces
        self.disk = DiskWatch(self.folder, self._limit("disk_bytes"), self._limit("files"), shared)
        self.running: dict[int, Command] = {}
        self._wake, wakes = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wakes, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes)
        # The host process handles a terminal's Ctrl-C. The kernel delivers to process 1 only signals with a handler.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def run(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            processes.kill_all(self.uid)

    def _turn(self) -> bool:
        ready = select.select([self.channel.fileno(), self._wake], [], [], _TICK_S)[0]
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
        processes.reap()
        if self._memory_is_over():
            self._end_all("memory")
        self._report()
        if self.channel.fileno() in ready and not self._serve():
            return False
        self._watch()
        return True

    def _limit(self, name: str) -> int:
        value = self.limits[name]
        assert value is not None
        return value

    def _serve(self) -> bool:
        try:
            data, descriptors, _, _ = socket.recv_fds(self.channel, 1, 8)
        except ConnectionError:
            return False
        if not data:
            return False
        try:
            with os.fdopen(descriptors.pop(0), "rb") as file:
                file.seek(0)
                request = json.load(file)
            if request["op"] == "exec":
                self._exec(request, descriptors)
            elif request["op"] == "kill":
                self._kill(request["id"], request["reason"])
            else:
                self._listen(request)
        except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError, OSError):
            return False  # The run's process writes no such request, so the sandbox ends.
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _send(self, message: dict[str, object], descriptors: tuple[int, ...] = ()) -> None:
        with contextlib.suppress(ConnectionError):
            socket.send_fds(self.channel, [json.dumps(message).encode()], descriptors)

    def _exec(self, request: dict[str, Any], streams: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            self._send({"id": request["id"], "failed": f"fork: {error}"})
            return
        if pid == 0:
            self._become(request, streams)
        self.running[pid] = Command(request["id"])

    def _become(self, request: dict[str, Any], streams: list[int]) -> None:
        """Executes the command in the child process. On failure it writes the reason to stderr and exits with 126."""
        try:
            for target, source in enumerate(streams):
                # The descriptors that the requests brought are never below 3.
                os.dup2(source, target)
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            if self.group:
                self.group.enter()
            kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
            if self.readable is not None:
                landlock.restrict(self.readable)
            os.closerange(3, _FD_LIMIT)
            self._set_limits()
            if self.uid is not None:
                os.setgroups([])
                os.setresgid(self.uid, self.uid, self.uid)
                os.setresuid(self.uid, self.uid, self.uid)
            os.umask(0o022)
            os.chdir(request["cwd"])
            kernel.restrict(self._filter)
            os.execvpe(request["argv"][0], request["argv"], request["env"])
        except (OSError, ValueError) as error:
            os.write(2, f"the sandbox cannot start the command: {error}\n".encode())
        finally:
            os._exit(126)

    def _set_limits(self) -> None:
        limits = {
            resource.RLIMIT_CPU: self.limits["cpu_s"],
            resource.RLIMIT_AS: self.limits["address_space_bytes"],
            resource.RLIMIT_FSIZE: self.limits["disk_bytes"],
            resource.RLIMIT_NOFILE: self.limits["open_files"],
            resource.RLIMIT_CORE: 0,
        }
        limits[resource.RLIMIT_NPROC] = self._process_limit()
        for name, value in limits.items():
            _, hard = resource.getrlimit(name)
            if value is not None:
                value = value if hard == resource.RLIM_INFINITY else min(value, hard)
                # At the hard limit of CPU time the kernel sends SIGKILL, which has no reason.
                more = value + 5 if name == resource.RLIMIT_CPU else value
                resource.setrlimit(name, (value, more if hard == resource.RLIM_INFINITY else min(more, hard)))

    def _process_limit(self) -> int:
        """Returns the kernel's limit of tasks. A fork bomb is faster than the watch, so the kernel needs a limit. It is
        above the watch's limit, so that the watch ends the command and reports the reason. The kernel counts all tasks
        of a user, which may include tasks outside the sandbox."""
        limit = 2 * self._limit("processes")
        own = self.namespaces and _counts_by_namespace()
        if self.uid is not None or own:
            return limit
        return limit + processes.count_user_tasks(os.getuid()) + _SPARE_TASKS

    def _kill(self, number: int, reason: str) -> None:
        for leader, command in self.running.items():
            if command.number == number:
                command.reason = command.reason or reason
                # The second pass kills processes that started during the first pass.
                for _ in range(2):
                    processes.send(processes.find_processes(processes.pids(), leader), signal.SIGKILL)

    def _listen(self, request: dict[str, Any]) -> None:
        try:
            with socket.create_server(("127.0.0.1", request["port"])) as listener:
                self._send({"id": request["id"]}, (listener.fileno(),))
        except OSError as error:
            self._send({"id": request["id"], "failed": f"port {request['port']}: {error}"})

    def _report(self) -> None:
        for pid in [pid for pid in self.running if pid in processes.ended]:
            command, status = self.running.pop(pid), processes.ended[pid]
            code = os.waitstatus_to_exitcode(status)
            self._send(
                {"id": command.number, "code": code if code >= 0 else 128 - code, "reason": command.reason}
            )
        processes.ended.clear()

    def _watch(self) -> None:
        """Ends all commands when the processes together exceed a limit."""
        pids = processes.pids()
        if not pids:
            return
        reason = ""
        if len(pids) > self._limit("processes"):
            reason = "processes"
        elif self._memory_bytes(pids) > self._limit("memory_bytes"):
            reason = "memory"
        else:
            reason = self.disk.breach(pids)
        if reason:
            self._end_all(reason)
            self._report()

    def _end_all(self, reason: str) -> None:
        for command in self.running.values():
            command.reason = command.reason or reason
        processes.kill_all(self.uid)

    def _memory_is_over(self) -> bool:
        """Returns True if the kernel has ended a process because of the memory limit since the last call."""
        before, self._kills = self._kills, self.group.kills() if self.group else 0
        return self._kills > before

    def _memory_bytes(self, pids: list[int]) -> int:
        """Counts the memory that no group counts: all memory, if the host allows no group."""
        if self.group:
            return self.disk.held.inet_bytes
        other = self.disk.held.buffer_bytes
        for folder in self.memory_files:
            status = os.statvfs(folder)
            other += (status.f_blocks - status.f_bfree) * status.f_frsize
        return processes.memory_bytes(pids, self._limit("memory_bytes"), other)


def _counts_by_namespace() -> bool:
    """Returns True if the kernel counts processes per user namespace (Linux 5.14), instead of per user."""
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("".join(filter(str.isdigit, minor)))) >= (5, 14)
