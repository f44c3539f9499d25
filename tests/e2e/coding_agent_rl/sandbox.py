"""The sandbox of the coding-agent stand-in: a class of a plug-in, on top of a local sandbox.

Its image is a repository with a wrong program, and a program `claude` that asks the model twice and corrects the file.
"""

from __future__ import annotations

import os

from slime.agent.sandbox import E2BSandbox, ExecResult, FileContent, LocalSandbox, Sandbox

CLAUDE = """#!/usr/bin/env python3
import json, os, sys, urllib.request
said = []
for text in (sys.argv[sys.argv.index("-p") + 1], "and now"):
    said.append({"role": "user", "content": text})
    body = {"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 12, "messages": said}
    key = "Bearer " + os.environ["ANTHROPIC_AUTH_TOKEN"]
    request = urllib.request.Request(
        os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", json.dumps(body).encode(), {"Authorization": key}
    )
    said.append({"role": "assistant", "content": json.loads(urllib.request.urlopen(request).read())["content"]})
open("add.py", "w").write("def add(a, b):\\n    return a + b\\n")
"""
FILES = {"add.py": "def add(a, b):\n    return a - b\n", "README.md": "sums\n"}
GIT = "git -c user.name=a -c user.email=a@b.c"


def create_sandbox(image: str) -> Sandbox:
    if os.environ.get("SWE_SANDBOX_PROVIDER") == "e2b":
        return E2BSandbox(image)
    return RepositorySandbox(image)


class RepositorySandbox:
    """Paths below /testbed and /tmp are in the folder of the local sandbox."""

    single_user = True

    def __init__(self, image: str) -> None:
        self.image, self.sandbox_id = image, ""
        self.inner = LocalSandbox(network="host")

    async def __aenter__(self) -> RepositorySandbox:
        await self.inner.__aenter__()
        self.sandbox_id, self.home = self.inner.sandbox_id, self.inner.home
        for name, text in FILES.items():
            await self.write_file(f"/testbed/{name}", text)
        await self.inner.write_file(f"{self.home}/bin/claude", CLAUDE)
        await self.inner.exec(f"chmod +x {self.home}/bin/claude", check=True)
        await self.exec(f"cd /testbed && git init -q && git add . && {GIT} commit -qm start", check=True)
        return self

    async def __aexit__(self, kind, error, trace) -> None:
        await self.inner.__aexit__(kind, error, trace)

    def inside(self, text: str) -> str:
        text = text.replace("/testbed", f"{self.inner.folder}/work/testbed")
        return text.replace(" /tmp/", f" {self.inner.folder}/tmp/")

    async def exec(
        self, cmd: str, *, user="root", env=None, timeout: int = 120, check=False, idempotent=True
    ) -> ExecResult:
        command = f"export PATH={self.home}/bin:/usr/bin:/bin; {self.inside(cmd)}"
        return await self.inner.exec(command, env=env, timeout=timeout, check=check)

    async def write_file(self, sandbox_path: str, content: FileContent, *, user="root") -> None:
        if isinstance(content, str):
            content = self.inside(content)
        await self.inner.write_file(self.inside(f" {sandbox_path}").strip(), content, user=user)

    async def read_file(self, sandbox_path: str, *, user="root") -> str:
        return await self.inner.read_file(self.inside(f" {sandbox_path}").strip(), user=user)
