"""Any program that takes its model's address from the environment, as the clients of OpenAI and Anthropic do."""

from __future__ import annotations

from urllib.parse import urlsplit

from slime.agent.sandbox import ExecResult, LocalSandbox, Sandbox
from slime.agent.session_keys import key_of

_LOOPBACK = ("127.0.0.1", "localhost")


def endpoint(base_url: str, api_key: str) -> dict[str, str]:
    """The variables of both clients. OpenAI's expects /v1 at the end of its address, Anthropic's adds it by itself."""
    root = base_url.rstrip("/").removesuffix("/v1")
    return {
        "OPENAI_BASE_URL": f"{root}/v1",
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": api_key,
    }


async def reach(sandbox: Sandbox, base_url: str) -> None:
    """Let a sandbox without network reach the one port of this host's loopback that `base_url` names."""
    url = urlsplit(base_url)
    if url.hostname is None or url.port is None:
        raise ValueError(
            f"base_url must be an address with its port, as http://127.0.0.1:8000/v1, got {base_url!r}; "
            "give the base_url of a session"
        )
    if isinstance(sandbox, LocalSandbox) and url.hostname in _LOOPBACK:
        await sandbox.allow_loopback(url.port)


async def run_agent(
    sandbox: Sandbox,
    command: str,
    *,
    base_url: str,
    api_key: str,
    time_s: float = 1800,
    env: dict[str, str] | None = None,
    cwd: str | None = None,
    stdin: str | None = None,
    user: str = "root",
) -> ExecResult:
    """Run `command` against a session until it ends or its time is over (`timed_out`).

    `base_url`, `api_key`: of the session; for one that an adapter has opened, its name serves as `api_key`. A
    LocalSandbox needs network="loopback" to reach it; any other sandbox must reach the address by itself. `stdin`:
    often the task.
    """
    await reach(sandbox, base_url)
    variables = {**endpoint(base_url, key_of(api_key)), **(env or {})}
    return await sandbox.exec(command, user=user, env=variables, timeout=time_s, cwd=cwd, stdin=stdin)
