"""Runs a sandbox in a service with E2B's protocol, through the package `e2b`, which the caller installs.

This project never ran it with a real service: a test checks the calls with a substitute for the package.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from slime.agent.sandbox.protocol import ExecResult, FileContent, SandboxError, checked, not_running
from slime.agent.settings import setting

IMAGE_KEY = "SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY"
_LARGE_FILE_S = 600.0


class E2BSandbox:
    """`async with E2BSandbox("image") as sandbox`. The service enforces the limits.

    `timeout`: seconds that the sandbox may live; default $SLIME_AGENT_SANDBOX_LIFETIME_SEC, else an hour.
    `image_metadata_key`: the key under which the service's gateway reads the image; default
    $SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY. Without a key, the image is the name of a template, as E2B's own service
    wants it. A command is sent once: one whose connection fails could have run.
    """

    single_user = False

    def __init__(
        self, image: str, *, timeout: float | None = None, image_metadata_key: str | None = None
    ) -> None:
        self.image = image
        self.timeout = float(setting("SANDBOX_LIFETIME_SEC") or 3600) if timeout is None else timeout
        self.image_metadata_key = image_metadata_key or setting("SANDBOX_IMAGE_METADATA_KEY")
        self.sandbox_id = ""
        self._e2b: Any = None
        self._box: Any = None

    async def __aenter__(self) -> Self:
        """Starts the sandbox. Raises ValueError if the package is missing."""
        try:
            self._e2b = import_module("e2b")
        except ModuleNotFoundError as error:
            raise ValueError(
                "E2BSandbox must have the Python package e2b, got none; run `pip install e2b`, or take LocalSandbox or "
                "ContainerSandbox"
            ) from error
        which: dict[str, object] = {"template": self.image}
        if self.image_metadata_key:
            which = {"metadata": {self.image_metadata_key: self.image}}
        self._box = await self._e2b.AsyncSandbox.create(timeout=int(self.timeout), **which)
        self.sandbox_id = self._box.sandbox_id
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._box is not None:
            box, self._box = self._box, None
            await box.kill()

    def _running(self) -> Any:
        if self._box is None:
            raise not_running()
        return self._box

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
        """Runs a command; see protocol.Sandbox. Raises ValueError for `stdin`; write a file and read it in the
        command."""
        if stdin is not None:
            raise ValueError(
                "stdin must be None for E2BSandbox, got text; write_file it and read it in the command"
            )
        try:
            done = await self._running().commands.run(cmd, user=user, envs=env, cwd=cwd, timeout=timeout)
        except self._e2b.CommandExitException as ended:
            done = ended
        except self._e2b.TimeoutException as late:
            return checked(ExecResult(124, "", str(late), "time"), cmd, check)
        except self._e2b.SandboxException as error:
            raise SandboxError(f"the E2B sandbox {self.sandbox_id} failed: {error}") from error
        return checked(ExecResult(done.exit_code, done.stdout or "", done.stderr or ""), cmd, check)

    async def write_file(self, sandbox_path: str, content: FileContent, *, user: str = "root") -> None:
        """Writes a file as `protocol.Sandbox.write_file` describes."""
        data = content.read_bytes() if isinstance(content, Path) else content
        await self._running().files.write(sandbox_path, data, user=user, request_timeout=_LARGE_FILE_S)

    async def read_file(self, sandbox_path: str, *, user: str = "root") -> str:
        """Reads a file as `protocol.Sandbox.read_file` describes."""
        try:
            return str(await self._running().files.read(sandbox_path, user=user))
        except self._e2b.NotFoundException:
            return ""
