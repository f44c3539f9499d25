"""Runs a sandbox in a container of docker or podman, through the engine's command line.

This project never ran it with a real engine: the tests check the command lines with a substitute program.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import secrets
import tarfile
from pathlib import Path
from types import TracebackType
from typing import Self

from slime.agent.sandbox.channel import CommandOutput, all_read
from slime.agent.sandbox.protocol import (
    ExecResult,
    FileContent,
    Limits,
    Reason,
    SandboxError,
    checked,
)
from slime.config.child_environment import without_secrets

_ENGINE_S = 300.0
_GROUP = "/tmp/.vime-command-"  # ok: a path in the sandbox


class ContainerSandbox:
    """`async with ContainerSandbox("python:3.12") as sandbox`. The image needs sh, timeout, setsid, cat and tar.

    `network`: "none", or another value of the engine's --network. `engine`: the program, with its first arguments.
    The engine enforces the limits of memory, processes, open files and the size of one file. This class enforces the
    limits of time and output. The total size of all files is not limited.
    """

    single_user = False

    def __init__(
        self,
        image: str,
        *,
        engine: tuple[str, ...] = ("docker",),
        limits: Limits | None = None,
        network: str = "none",
        workdir: str = "/",
        timeout: float | None = None,
        slots: asyncio.Semaphore | None = None,
    ) -> None:
        self.image, self.engine, self.limits = image, engine, limits or Limits()
        self.network, self.workdir, self.slots = network, workdir, slots
        self.sandbox_id = f"vime-{secrets.token_hex(8)}"
        self._lifetime = "infinity" if timeout is None else f"{timeout:g}"
        self._running = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Starts the container. Raises SandboxError with the engine's message if the start fails."""
        if self.slots:
            await self.slots.acquire()
        self._running = True
        limits = self.limits
        result = await self._engine(
            *("run", "--detach", "--rm", "--init", "--name", self.sandbox_id, "--network", self.network),
            *("--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes)),
            *("--pids-limit", str(limits.processes), "--security-opt", "no-new-privileges"),
            *("--ulimit", f"nofile={limits.open_files}", "--ulimit", f"fsize={limits.disk_bytes}"),
            *("--ulimit", "core=0", "--shm-size", str(limits.tmp_bytes), "--entrypoint", "sleep"),
            *(self.image, self._lifetime),
        )
        if result.exit_code:
            await self.close()
            raise SandboxError(
                f"{self.engine[0]} cannot start {self.image!r}: {result.stderr[-400:]}; try the same by hand"
            )

    async def close(self) -> None:
        """Removes the container with all its processes. It may be called again."""
        if self._running:
            self._running = False
            try:
                await asyncio.shield(self._engine("rm", "--force", self.sandbox_id))
            finally:
                if self.slots:
                    self.slots.release()

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
        """Runs a command as `protocol.Sandbox.exec` describes."""
        if not self._running:
            raise SandboxError(
                "the sandbox must run before it is used, got a closed one; use `async with`, or call start()"
            )
        group = _GROUP + secrets.token_hex(8)
        # The values go through the client's environment, because everyone on the host sees a command line.
        names = [word for name in env or {} for word in ("--env", name)]
        leader = f'echo $$ > {group}; chmod 600 {group}; exec sh -c "$1"'
        result = await self._engine(
            *("exec", "--interactive", "--user", user, "--workdir", cwd or self.workdir, *names),
            *(self.sandbox_id, "setsid", "--wait", "sh", "-c", leader, "sh", cmd),
            env=env,
            stdin=stdin,
            timeout=timeout,
        )
        if result.reason:
            # The client's end leaves the command running in the container.
            kill = f'kill -9 -- "-$(cat {group})"'
            await self._engine("exec", "--user", "root", self.sandbox_id, "sh", "-c", kill)
        return checked(result, cmd, check)

    async def write_file(self, sandbox_path: str, content: FileContent, *, user: str = "root") -> None:
        """Writes a file; see protocol.Sandbox. Every path is allowed, because all paths are in the container."""
        data = content.read_bytes() if isinstance(content, Path) else content
        script = 'mkdir -p "$(dirname "$1")" && cat > "$1"'
        result = await self._engine(
            *("exec", "--interactive", "--user", user, "--workdir", self.workdir, self.sandbox_id),
            *("sh", "-c", script, "sh", sandbox_path),
            stdin=data,
        )
        checked(result, f"write {sandbox_path}", True)

    async def read_file(self, sandbox_path: str, *, user: str = "root") -> str:
        """Reads a file; see protocol.Sandbox. Also raises ValueError if the file is larger than the limit of a
        command's output."""
        result = await self._engine(
            *("exec", "--user", user, "--workdir", self.workdir, self.sandbox_id, "cat", "--", sandbox_path)
        )
        if result.truncated:
            raise ValueError(
                f"{sandbox_path!r} of the sandbox must have at most {self.limits.output_bytes} bytes; "
                "read it in pieces"
            )
        return "" if result.exit_code else result.stdout

    async def upload(self, source: Path, sandbox_path: str = ".") -> None:
        """Copies a folder of this host into a folder of the container."""
        buffer = io.BytesIO()
        with tarfile.TarFile(fileobj=buffer, mode="w") as archive:
            for path in sorted(source.rglob("*")):
                if path.is_file() and not path.is_symlink():
                    archive.add(path, str(path.relative_to(source)))
        script = 'mkdir -p "$1" && tar -x -C "$1"'
        result = await self._engine(
            *("exec", "--interactive", "--workdir", self.workdir, self.sandbox_id, "sh", "-c", script),
            *("sh", sandbox_path),
            stdin=buffer.getvalue(),
        )
        checked(result, f"upload {sandbox_path}", True)

    async def download(self, sandbox_path: str, target: Path) -> int:
        """Copies the regular files below a folder of the container to `target` and returns their number."""
        output = CommandOutput(self.limits.disk_bytes)
        result, data = await self._run(
            output,
            *("exec", "--workdir", self.workdir, self.sandbox_id, "tar", "-c", "-C", sandbox_path, "."),
        )
        checked(result, f"download {sandbox_path}", True)
        with tarfile.TarFile(fileobj=io.BytesIO(data)) as archive:
            files = [member for member in archive.getmembers() if member.isreg()]
            # "data" refuses names that lead out of the target.
            archive.extractall(target, files, filter="data")
        return len(files)

    async def _engine(
        self,
        *words: str,
        env: dict[str, str] | None = None,
        stdin: str | bytes | None = None,
        timeout: float = _ENGINE_S,
    ) -> ExecResult:
        output = CommandOutput(self.limits.output_bytes)
        result, _ = await self._run(output, *words, env=env, stdin=stdin, timeout=timeout)
        return result

    async def _run(
        self,
        output: CommandOutput,
        *words: str,
        env: dict[str, str] | None = None,
        stdin: str | bytes | None = None,
        timeout: float = _ENGINE_S,
    ) -> tuple[ExecResult, bytes]:
        """Runs the engine's client, and kills it after `timeout` seconds or at the limit of its output."""
        writers: list[int] = []
        try:
            out_end, out = await output.pipe()
            writers.append(out_end)
            error_end, err = await output.pipe()
            writers.append(error_end)
            client = await asyncio.create_subprocess_exec(
                *self.engine,
                *words,
                stdin=asyncio.subprocess.PIPE,
                stdout=out_end,
                stderr=error_end,
                env={**without_secrets(), **(env or {})},
            )
        finally:
            for writer in writers:
                os.close(writer)
        feed = asyncio.ensure_future(_feed(client, stdin))
        tasks = [feed, asyncio.ensure_future(client.wait()), asyncio.ensure_future(output.full.wait())]
        reason: Reason = ""
        try:
            await asyncio.wait(tasks[1:], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[1].done():
                reason = "output" if tasks[2].done() else "time"
        finally:
            if client.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    client.kill()
                await client.wait()
            for task in tasks:
                task.cancel()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(all_read(out, err), 1)
            out.transport.close()
            err.transport.close()
        code = client.returncode or 0
        if reason == "" and output.truncated:
            reason = "output"
        result = ExecResult(
            code if code >= 0 else 128 - code, out.text(), err.text(), reason, output.truncated
        )
        return result, bytes(out.data)


async def _feed(client: asyncio.subprocess.Process, stdin: str | bytes | None) -> None:
    assert client.stdin is not None
    with contextlib.suppress(ConnectionError):
        client.stdin.write(stdin.encode() if isinstance(stdin, str) else stdin or b"")
        await client.stdin.drain()
    client.stdin.close()
