"""Functions for sandboxes that plug-ins of slime call."""

from __future__ import annotations

import asyncio
import shlex
import time

from slime.agent.sandbox.container import ContainerSandbox
from slime.agent.sandbox.e2b import E2BSandbox
from slime.agent.sandbox.local import LocalSandbox
from slime.agent.sandbox.modal import ModalSandbox
from slime.agent.sandbox.protocol import Sandbox
from slime.agent.settings import setting
from slime.hooks import load_function

BACKEND = "SLIME_AGENT_SANDBOX_BACKEND"
EXIT_TIME_BUDGET_EXCEEDED = -1
POLL_S = 5.0


def make_sandbox(image: str, *, timeout: float | None = None) -> Sandbox:
    """Makes the sandbox that the environment names: docker, podman, e2b, modal, local (which has no images), or
    `module.Class`.

    A class is called as `Class(image, timeout=timeout)`. A container may live for `timeout` seconds.
    """
    backend = setting("SANDBOX_BACKEND") or ""
    if backend in ("docker", "podman"):
        return ContainerSandbox(image, engine=(backend,), timeout=timeout)
    if backend == "e2b":
        return E2BSandbox(image, timeout=timeout)
    if backend == "modal":
        return ModalSandbox(image, timeout=timeout)
    if backend == "local":
        return LocalSandbox()
    if "." not in backend:
        raise ValueError(
            f"{BACKEND} must be docker, podman, e2b, local or modal, or the dotted path of a class, got {backend!r}; "
            "local runs commands on this host and ignores the image"
        )
    sandbox: Sandbox = load_function(backend, BACKEND)(image, timeout=timeout)
    return sandbox


async def ensure_agent_user(sb: Sandbox, workdir: str) -> None:
    """Makes a user `agent` that owns `workdir` and may use git there. It does nothing in a sandbox with one user."""
    if getattr(sb, "single_user", False):
        return
    folder = shlex.quote(workdir)
    await sb.exec(
        "id agent >/dev/null 2>&1 || useradd --create-home --shell /bin/bash agent || exit 1; "
        f"chown -R agent: ~agent {folder} || exit 1; "
        "! command -v git >/dev/null || git config --system --add safe.directory '*'",
        user="root",
        check=True,
        timeout=120,
    )


async def exec_and_wait(
    sb: Sandbox,
    *,
    cmd: str,
    time_budget_sec: float,
    tag: str,
    user: str = "root",
    env: dict[str, str] | None = None,
    workdir: str | None = None,
    out_file: str | None = None,
    want_output: bool = False,
) -> tuple[int, str]:
    """Runs a command, and returns its exit code and, with `want_output`, its stdout and stderr together. The exit code
    is -1 if the time is over.

    The sandboxes of this package hold a command for as long as it runs. With another one, whose connection may end
    early, the command runs in the background under `tag`, and polls read its exit code.
    """
    start = f"cd {shlex.quote(workdir)} && " if workdir else ""
    if isinstance(sb, LocalSandbox | ContainerSandbox):
        into = f" > {shlex.quote(out_file)}" if out_file else ""
        result = await sb.exec(
            f"{{ {start}{{\n{cmd}\n}}; }} 2>&1{into}", user=user, env=env, timeout=time_budget_sec
        )
        output = await sb.read_file(out_file, user=user) if out_file and want_output else result.stdout
        code = EXIT_TIME_BUDGET_EXCEEDED if result.timed_out else result.exit_code
        return code, output if want_output else ""
    folder = "/tmp"  # ok: a path in the sandbox
    output_file = out_file or f"{folder}/{tag}.out"
    script, done = f"{folder}/{tag}.sh", f"{folder}/{tag}.done"
    await sb.write_file(script, f"{start}{{\n{cmd}\n}}\n", user=user)
    inner = f"bash {script} > {shlex.quote(output_file)} 2>&1; echo $? > {done}.part; mv {done}.part {done}"
    await sb.exec(
        f"rm -f {done}; setsid bash -c {shlex.quote(inner)} < /dev/null > /dev/null 2>&1 &",
        user=user,
        env=env,
        check=True,
    )
    code, end = EXIT_TIME_BUDGET_EXCEEDED, time.monotonic() + time_budget_sec
    while time.monotonic() < end:
        await asyncio.sleep(min(POLL_S, max(0.0, end - time.monotonic())))
        status, text, _ = await sb.exec(f"cat {done} 2>/dev/null", user=user, timeout=15)
        if status == 0 and text.strip():
            code = int(text)
            break
    return code, await sb.read_file(output_file, user=user) if want_output else ""
