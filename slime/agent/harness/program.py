"""Runs any program that reads its model's address from the environment, as the clients of OpenAI and Anthropic do."""

from __future__ import annotations

from urllib.parse import urlsplit

from slime.agent.sandbox import ExecResult, LocalSandbox, Sandbox
from slime.agent.session_keys import key_for

_LOOPBACK = ("127.0.0.1", "localhost")


def endpoint(base_url: str, api_key: str) -> dict[str, str]:
    """Returns the environment variables for both clients. OpenAI's client expects /v1 at the end of the address;
    Anthropic's client adds /v1."""
    root = base_url.rstrip("/").removesuffix("/v1")
    return {
        "OPENAI_BASE_URL": f"{root}/v1",
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": api_key,
    }


async def reach(sandbox: Sandbox, base_url: str) -> None:
    """Opens the port of `base_url` for a sandbox without network, if `base_url` is on this host's loopback. Raises
    ValueError for another address, which such a sandbox cannot reach."""
    url = urlsplit(base_url)
    if url.hostname is None or url.port is None:
        raise ValueError(
            f"base_url must be an address with its port, as http://127.0.0.1:8000/v1, got {base_url!r}; "
            "give the base_url of a session"
        )
    if not isinstance(sandbox, LocalSandbox):
        return
    if url.hostname in _LOOPBACK:
        await sandbox.allow_loopback(url.port)
    elif sandbox.isolation == "namespaces" and sandbox.network != "host":
        raise ValueError(
            f"a LocalSandbox must have network='host' to reach {base_url}, got {sandbox.network!r}; make it with that, "
            "or leave --session-host out"
        )


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
    """Runs `command` with the model of a session until the command ends or its time is over (`timed_out`).

    `base_url` and `api_key` belong to the session. If an adapter has opened the session, its name serves as `api_key`.
    A LocalSandbox needs network="loopback" to reach the address. Any other sandbox needs a network that reaches it.
    `stdin` often holds the task.
    """
    await reach(sandbox, base_url)
    variables = {**endpoint(base_url, key_for(api_key)), **(env or {})}
    return await sandbox.exec(command, user=user, env=variables, timeout=time_s, cwd=cwd, stdin=stdin)
