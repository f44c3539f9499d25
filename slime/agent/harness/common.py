"""What agents of slime's plug-ins have in common: install, configure, run, wait."""

from __future__ import annotations

import os
import shlex
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from slime.agent.harness.program import endpoint, reach
from slime.agent.sandbox import EXIT_TIME_BUDGET_EXCEEDED, Sandbox, ensure_agent_user, exec_and_wait
from slime.agent.session_keys import key_of

__all__ = ["EXIT_TIME_BUDGET_EXCEEDED", "BaseHarness", "HarnessContext", "home_of", "install", "run_command"]

_INSTALL_S = 300
_HOME = os.path.join("/home", "agent")
_NODE = "/usr/local/lib/agent-node"
_NODE_FILE = "/tmp/node.tar"  # ok: a path in the sandbox
_AGENT_FILE = "/tmp/agent.tgz"  # ok: a path in the sandbox


@dataclass(frozen=True)
class HarnessContext:
    """What an agent is run with. `session_id` is the key that it shows at `adapter_url`."""

    workdir: str
    session_id: str
    adapter_url: str
    model_label: str = "slime-actor"


class BaseHarness(ABC):
    """One kind of agent. Holds no state of a run, so one object serves all."""

    name = ""

    @abstractmethod
    async def install_cli(self, sb: Sandbox) -> None:
        """Put the program into the sandbox."""

    @abstractmethod
    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Write what the program reads at its start."""

    @abstractmethod
    async def launch_and_wait(
        self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float
    ) -> int:
        """Run it to its end: its exit code, -1 when the time is over."""

    async def run(
        self,
        sb: Sandbox,
        *,
        workdir: str,
        session_id: str,
        adapter_url: str,
        time_budget_sec: float,
        prompt: str,
    ) -> int:
        """Configure and run the program in `workdir`, which exists: its exit code, -1 when the time is over. It gets
        the key of the session `session_id` that an adapter has opened."""
        await ensure_agent_user(sb, workdir)
        await reach(sb, adapter_url)
        ctx = HarnessContext(workdir, key_of(session_id), adapter_url)
        await self.write_config(sb, ctx)
        return await self.launch_and_wait(sb, ctx, prompt, time_budget_sec)


def home_of(sb: Sandbox) -> str:
    """Where the program looks for its files."""
    home: str = getattr(sb, "home", _HOME)
    return home


async def run_command(
    sb: Sandbox, *, workdir: str, start_cmd: str, env: dict[str, str], time_budget_sec: float
) -> int:
    """Run a command as the user `agent`; what it writes goes to .harness/trajectory.jsonl of `workdir`."""
    record = f"{workdir}/.harness"
    await sb.exec(f"mkdir -p {shlex.quote(record)}", user="agent", check=True)
    code, _ = await exec_and_wait(
        sb,
        cmd=start_cmd,
        user="agent",
        env={"HOME": home_of(sb), **env},
        workdir=workdir,
        out_file=f"{record}/trajectory.jsonl",
        time_budget_sec=time_budget_sec,
        tag="harness",
    )
    return code


async def install(sb: Sandbox, program: str, archive_variable: str) -> None:
    """Nothing where the program is already there; else the npm package that the variable names, on the Node of
    SLIME_AGENT_NODE_TARBALL where that is set. ValueError if there is neither."""
    code, _, _ = await sb.exec(f"command -v {program}")
    if code == 0:
        return
    archive = os.environ.get(archive_variable)
    if not archive:
        raise ValueError(
            f"{program} must be in the sandbox, or {archive_variable} must name its npm package, got neither; "
            "take an image that has it, or export the variable"
        )
    node = os.environ.get("SLIME_AGENT_NODE_TARBALL")
    if node:
        await sb.write_file(_NODE_FILE, Path(node))
        unpack = f"mkdir -p {_NODE} && tar -xf {_NODE_FILE} -C {_NODE} --strip-components=1"
        await sb.exec(f"{unpack} && ln -sf {_NODE}/bin/* /usr/local/bin/", check=True, timeout=_INSTALL_S)
    await sb.write_file(_AGENT_FILE, Path(archive))
    await sb.exec(
        f"npm install --global --prefix /usr/local {_AGENT_FILE} && command -v {program}",
        check=True,
        timeout=_INSTALL_S,
    )


def environment_of(ctx: HarnessContext) -> dict[str, str]:
    return endpoint(ctx.adapter_url, ctx.session_id)
