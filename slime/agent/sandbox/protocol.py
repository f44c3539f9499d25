"""Defines the interface of sandboxes: the methods of a sandbox, the result of a command, and the limits."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self, runtime_checkable

FileContent = str | bytes | Path
"""Text, bytes, or the path of a file on this host."""
Reason = Literal["", "time", "output", "memory", "processes", "disk", "files", "cpu", "file size"]
"""The limit that ended a command; "" if no limit ended the command."""


class SandboxError(RuntimeError):
    """Raised if a sandbox does not start, or ends during a command."""

    failed_sample = "sandbox"


class ExecResult(tuple[int, str, str]):
    """The result of a command: a tuple (exit_code, stdout, stderr), which hooks of slime unpack, with two more fields.

    If a signal ended the command, the exit code is 128 + the number of the signal. Invalid UTF-8 is replaced.
    """

    reason: Reason
    truncated: bool
    """True if output beyond the limit was dropped."""

    def __new__(
        cls, exit_code: int, stdout: str, stderr: str, reason: Reason = "", truncated: bool = False
    ) -> Self:
        self = super().__new__(cls, (exit_code, stdout, stderr))
        self.reason, self.truncated = reason, truncated
        return self

    @property
    def exit_code(self) -> int:
        return self[0]

    @property
    def stdout(self) -> str:
        return self[1]

    @property
    def stderr(self) -> str:
        return self[2]

    @property
    def timed_out(self) -> bool:
        return self.reason == "time"


@dataclass(frozen=True)
class Limits:
    """The limits of a sandbox. A limit covers the sum over all processes unless its text names one process.

    Raises ValueError unless all limits are positive.
    """

    memory_bytes: int = 2 << 30
    """Resident memory in bytes."""
    address_space_bytes: int | None = 8 << 30
    """Address space of a process in bytes. Use None for programs that reserve much more memory than they use, such as
    Node with WebAssembly."""
    processes: int = 256
    """Number of processes. Threads count if the kernel counts them."""
    cpu_s: int = 3600
    """CPU time of a process in seconds."""
    disk_bytes: int = 1 << 30
    """Bytes in the sandbox's folder, and bytes in one file."""
    files: int = 50_000
    """Number of files and folders in the sandbox's folder."""
    open_files: int = 1024
    """Number of open files of a process."""
    output_bytes: int = 1 << 20
    """Bytes of stdout and stderr of a command together."""
    tmp_bytes: int = 64 << 20
    """Size in bytes of /tmp, and of /dev/shm. Both are in memory."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value <= 0:
                raise ValueError(
                    f"Limits.{field.name} must be positive, got {value}; leave it out for the default"
                )


@runtime_checkable
class Sandbox(Protocol):
    """An isolated environment that runs a model's commands. `async with` starts and closes it."""

    sandbox_id: str

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    async def exec(
        self,
        cmd: str,
        *,
        user: str = "root",
        env: dict[str, str] | None = None,
        timeout: float = 120,
        check: bool = False,
        cwd: str | None = None,
        stdin: str | bytes | None = None,
    ) -> ExecResult:
        """Runs a shell command. With `check`, it raises RuntimeError unless the exit code is 0."""
        ...

    async def write_file(self, sandbox_path: str, content: FileContent, *, user: str = "root") -> None:
        """Writes a file and creates its parent folders. Raises ValueError for a path outside the sandbox."""
        ...

    async def read_file(self, sandbox_path: str, *, user: str = "root") -> str:
        """Returns the text of a file, or "" for a missing file, as slime does. Raises ValueError for a path outside the
        sandbox."""
        ...


def not_running() -> SandboxError:
    return SandboxError(
        "the sandbox must run before it is used, got a closed one; use `async with`, or call start()"
    )


def checked(result: ExecResult, cmd: str, check: bool) -> ExecResult:
    """Returns `result`. With `check`, it raises RuntimeError unless the exit code is 0."""
    if check and result.exit_code:
        why = f", ended by the {result.reason} limit" if result.reason else ""
        raise RuntimeError(
            f"sandbox command failed (exit={result.exit_code}{why}): {cmd[:120]}\n{result.stderr[-400:]}"
        )
    return result
