"""A small agent for Harbor's tasks, and containers of bubblewrap for machines without Docker.

The agent asks the model once and writes the answer to /app/answer.txt. Both classes run in the process of the
environment, in the Python that has Harbor.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment, ExecResult
from openai import AsyncOpenAI

OWN = ("app", "tests", "logs", "solution", "tmp", "root")
"""Folders that each container has for itself. The other folders are the machine's, which a container cannot change."""


class OneAnswer(BaseAgent):
    """Asks the model once."""

    @staticmethod
    def name() -> str:
        return "one-answer"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None: ...

    async def run(self, instruction: str, environment: BaseEnvironment, context: Any) -> None:
        variables = self._extra_env
        url, key = variables["OPENAI_BASE_URL"], variables["OPENAI_API_KEY"]
        async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            model = str(self.model_name).rpartition("/")[2]
            messages: list[Any] = [{"role": "user", "content": instruction}]
            answer = await client.chat.completions.create(model=model, messages=messages)
        file = self.logs_dir / "answer.txt"
        file.write_text(answer.choices[0].message.content or "", encoding="utf-8")
        await environment.upload_file(file, "/app/answer.txt")


class Bubblewrap(BaseEnvironment):
    """A container of bubblewrap. It has the programs of this machine, and folders of its own for the task."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._root = Path(tempfile.mkdtemp(prefix="harbor-bubblewrap-"))

    @staticmethod
    def type() -> str:
        return "bubblewrap"

    def _validate_definition(self) -> None: ...

    def _host(self, path: str) -> Path:
        return self._root / path.lstrip("/")

    async def start(self, force_build: bool) -> None:
        for name in (*OWN, "logs/agent", "logs/verifier", "logs/artifacts"):
            self._host(name).mkdir(parents=True, exist_ok=True)

    async def stop(self, delete: bool) -> None:
        await asyncio.to_thread(shutil.rmtree, self._root, ignore_errors=True)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        self._host(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, self._host(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, self._host(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self._host(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        shutil.copytree(self._host(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        shared = [name for name in os.listdir("/") if name not in (*OWN, "proc", "dev")]
        words = ["bwrap", "--die-with-parent", "--proc", "/proc", "--dev", "/dev"]
        words += [word for name in shared for word in ("--ro-bind-try", f"/{name}", f"/{name}")]
        words += [word for name in OWN for word in ("--bind", str(self._host(name)), f"/{name}")]
        words += ["--chdir", cwd or "/app", "sh", "-c", command]
        process = await asyncio.create_subprocess_exec(
            *words,
            env={**os.environ, **(self._merge_env(env) or {})},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, error = await asyncio.wait_for(process.communicate(), timeout_sec)
        finally:
            if process.returncode is None:
                process.kill()
        return ExecResult(stdout=out.decode(), stderr=error.decode(), return_code=process.returncode or 0)
