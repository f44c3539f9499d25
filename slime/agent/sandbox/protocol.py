"""What a sandbox is: the calls that every kind has, their result, the limits."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self, runtime_checkable

FileContent = str | bytes | Path
"""Text, bytes, or a file of this host."""
Reason = Literal["", "time", "output", "memory", "processes", "disk", "files", "cpu", "file size"]
"""The limit that ended a command; "" for a command that ended by itself."""


class SandboxError(RuntimeError):
    """The sandbox itself failed: it did not start, or ended under a command."""


class ExecResult(tuple[int, str, str]):
    """(exit_code, stdout, stderr), as hooks of slime unpack it, with what a limit did.

    A command that a signal ended has exit code 128 + the number of the signal. Bytes that are not UTF-8 are replaced.
    """

    reason: Reason
    truncated: bool
    """CommandOutput beyond the limit was dropped."""

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
    """Of one sandbox, all its processes together where nothing else is said. ValueError unless all are positive."""

    memory_bytes: int = 2 << 30
    """Resident memory."""
    address_space_bytes: int | None = 8 << 30
    """Of one process. None for programs that reserve much more than they use, such as Node with WebAssembly."""
    processes: int = 256
    """Processes; threads count where the kernel counts them."""
    cpu_s: int = 3600
    """CPU time of one process."""
    disk_bytes: int = 1 << 30
    """What the folder may hold, and one file."""
    files: int = 50_000
    """Files and folders in the folder."""
    open_files: int = 1024
    """Of one process."""
    output_bytes: int = 1 << 20
    """stdout and stderr of one command together."""
    tmp_bytes: int = 64 << 20
    """/tmp and /dev/shm, each. They are memory."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value <= 0:
                raise ValueError(
                    f"Limits.{field.name} must be positive, got {value}; leave it out for the default"
                )


@runtime_checkable
class Sandbox(Protocol):
    """A place where commands of a model run. `async with` starts and closes it."""

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
        """Run a shell command. With `check`, RuntimeError unless it ends with exit code 0."""
        ...

    async def write_file(self, sandbox_path: str, content: FileContent, *, user: str = "root") -> None:
        """Write a file and the folders above it. ValueError for a path outside the sandbox."""
        ...

    async def read_file(self, sandbox_path: str, *, user: str = "root") -> str:
        """The text of a file, "" if there is none (the rule of slime). ValueError for a path outside the sandbox."""
        ...


def not_running() -> SandboxError:
    return SandboxError(
        "the sandbox must run before it is used, got a closed one; use `async with`, or call start()"
    )


def checked(result: ExecResult, cmd: str, check: bool) -> ExecResult:
    """`result`, or with `check` RuntimeError unless its exit code is 0."""
    if check and result.exit_code:
        why = f", ended by the {result.reason} limit" if result.reason else ""
        raise RuntimeError(
            f"sandbox command failed (exit={result.exit_code}{why}): {cmd[:120]}\n{result.stderr[-400:]}"
        )
    return result
