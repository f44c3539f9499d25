"""Runs a sandbox in the service of Modal, through the package `modal`, which the caller installs.

This project never ran it with the real service: a test checks the calls with a substitute for the package.
"""

from __future__ import annotations

import asyncio
import shlex
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from slime.agent.sandbox.protocol import ExecResult, FileContent, SandboxError, checked, not_running
from slime.agent.settings import setting

_WRITE_S = 600
_LATE = -1
"""The code that the package returns for a command beyond its time."""


class ModalSandbox:
    """`async with ModalSandbox("registry/image:tag") as sandbox`. The service enforces the limits.

    `image` is an image of a registry. The defaults of the other arguments are SLIME_AGENT_SANDBOX_LIFETIME_SEC (else an
    hour) and SLIME_AGENT_SANDBOX_MODAL_APP, _CPU, _MEMORY_MB and _BLOCK_NETWORK (1 for True). A command of another user
    than root runs through `runuser`, because the service runs commands as root.
    """

    single_user = False

    def __init__(
        self,
        image: str,
        *,
        timeout: float | None = None,
        app_name: str | None = None,
        cpu: float | None = None,
        memory_mb: int | None = None,
        block_network: bool | None = None,
    ) -> None:
        self.image = image
        self.timeout = float(setting("SANDBOX_LIFETIME_SEC") or 3600) if timeout is None else timeout
        self.app_name = app_name or setting("SANDBOX_MODAL_APP") or "vime-agent-sandboxes"
        self.cpu = float(setting("SANDBOX_MODAL_CPU") or 2) if cpu is None else cpu
        self.memory_mb = int(setting("SANDBOX_MODAL_MEMORY_MB") or 8192) if memory_mb is None else memory_mb
        blocked = setting("SANDBOX_MODAL_BLOCK_NETWORK") in ("1", "true")
        self.block_network = blocked if block_network is None else block_network
        self.sandbox_id = ""
        self._modal: Any = None
        self._box: Any = None

    async def __aenter__(self) -> Self:
        """Starts the sandbox. Raises ValueError if the package is missing, SandboxError if the service refuses."""
        try:
            modal = self._modal = import_module("modal")
        except ModuleNotFoundError as error:
            raise ValueError(
                "ModalSandbox must have the Python package modal, got none; run `pip install modal`, or take "
                "LocalSandbox or ContainerSandbox"
            ) from error
        try:
            app = await modal.App.lookup.aio(self.app_name, create_if_missing=True)
            self._box = await modal.Sandbox.create.aio(
                app=app,
                image=modal.Image.from_registry(self.image),
                timeout=int(self.timeout),
                cpu=self.cpu,
                memory=self.memory_mb,
                block_network=self.block_network,
            )
        except modal.exception.Error as error:
            raise SandboxError(
                f"the Modal sandbox of {self.image!r} cannot start: {error}; check the image and the account"
            ) from error
        self.sandbox_id = self._box.object_id
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._box is not None:
            box, self._box = self._box, None
            await box.terminate.aio()

    async def _run(
        self, words: list[str], timeout: float, data: bytes | None = None, **more: object
    ) -> tuple[int, bytes, bytes]:
        """Runs a command with `data` as its input. Returns its code, stdout and stderr."""
        if self._box is None:
            raise not_running()
        try:
            process = await self._box.exec.aio(*words, timeout=max(1, round(timeout)), text=False, **more)
            if data is not None:
                process.stdin.write(data)
                process.stdin.write_eof()
                await process.stdin.drain.aio()
            out, err = await asyncio.gather(process.stdout.read.aio(), process.stderr.read.aio())
            return int(await process.wait.aio()), out or b"", err or b""
        except self._modal.exception.ExecTimeoutError:
            return _LATE, b"", b""
        except self._modal.exception.Error as error:
            raise SandboxError(
                f"the Modal sandbox {self.sandbox_id} failed: {error}; start another sandbox"
            ) from error

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
        words = ["sh", "-c", cmd]
        if user != "root":
            kept = [f"--whitelist-environment={','.join(env)}"] if env else []
            words = ["runuser", "--user", user, *kept, "--", *words]
        data = stdin.encode() if isinstance(stdin, str) else stdin
        more: dict[str, object] = {"workdir": cwd} if cwd else {}
        code, out, err = await self._run(words, timeout, data, env=dict(env or {}), **more)
        texts = out.decode(errors="replace"), err.decode(errors="replace")
        late = code == _LATE
        return checked(ExecResult(124 if late else code, *texts, "time" if late else ""), cmd, check)

    async def write_file(self, sandbox_path: str, content: FileContent, *, user: str = "root") -> None:
        """Writes a file as `protocol.Sandbox.write_file` describes."""
        data = content.read_bytes() if isinstance(content, Path) else content
        path, folder = shlex.quote(sandbox_path), shlex.quote(str(Path(sandbox_path).parent))
        await self.exec(
            f"mkdir -p {folder} && cat > {path}", user=user, stdin=data, timeout=_WRITE_S, check=True
        )

    async def read_file(self, sandbox_path: str, *, user: str = "root") -> str:
        """Reads a file as `protocol.Sandbox.read_file` describes."""
        result = await self.exec(f"cat -- {shlex.quote(sandbox_path)}", user=user)
        return "" if result.exit_code else result.stdout
