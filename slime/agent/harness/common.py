"""The base of the agents of slime's plug-ins: it installs, configures and runs a program, and waits for its end."""

from __future__ import annotations

import os
import shlex
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from slime.agent.harness.program import endpoint, reach
from slime.agent.sandbox import EXIT_TIME_BUDGET_EXCEEDED, Sandbox, ensure_agent_user, exec_and_wait
from slime.agent.session_keys import key_for
from slime.agent.settings import setting

__all__ = [
    "EXIT_TIME_BUDGET_EXCEEDED",
    "BaseHarness",
    "HarnessContext",
    "find_home",
    "install",
    "install_node22",
    "install_npm_cli",
    "run_agent",
    "run_command",
]

_INSTALL_S = 300
_HOME = os.path.join("/home", "agent")
_NODE = "/usr/local/lib/agent-node"
_NODE_FILE = "/tmp/node.tar"  # ok: a path in the sandbox
_AGENT_FILE = "/tmp/agent.tgz"  # ok: a path in the sandbox


@dataclass(frozen=True)
class HarnessContext:
    """The settings of an agent's run. `session_id` is the key that the agent sends to `adapter_url`."""

    workdir: str
    session_id: str
    adapter_url: str
    model_label: str = "slime-actor"


class BaseHarness(ABC):
    """One kind of agent. It holds no state of a run, so one object serves all runs."""

    name = ""

    @abstractmethod
    async def install_cli(self, sb: Sandbox) -> None:
        """Installs the program in the sandbox."""

    @abstractmethod
    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Writes the files that the program reads at its start."""

    @abstractmethod
    async def launch_and_wait(
        self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float
    ) -> int:
        """Runs the program to its end. Returns its exit code, or -1 when the time is over."""

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
        """Configures and runs the program in the existing folder `workdir`, with the key of the session `session_id`,
        which an adapter has opened. Returns the exit code, or -1 when the time is over."""
        await ensure_agent_user(sb, workdir)
        await reach(sb, adapter_url)
        ctx = HarnessContext(workdir, key_for(session_id), adapter_url)
        await self.write_config(sb, ctx)
        return await self.launch_and_wait(sb, ctx, prompt, time_budget_sec)


def find_home(sb: Sandbox) -> str:
    """Returns the home folder of the program in the sandbox."""
    home: str = getattr(sb, "home", _HOME)
    return home


async def run_command(
    sb: Sandbox, *, workdir: str, start_cmd: str, env: dict[str, str], time_budget_sec: float
) -> int:
    """Runs a command as the user `agent` and returns its exit code. Its output goes to .harness/trajectory.jsonl in
    `workdir`."""
    record = f"{workdir}/.harness"
    await sb.exec(f"mkdir -p {shlex.quote(record)}", user="agent", check=True)
    code, _ = await exec_and_wait(
        sb,
        cmd=start_cmd,
        user="agent",
        env={"HOME": find_home(sb), **env},
        workdir=workdir,
        out_file=f"{record}/trajectory.jsonl",
        time_budget_sec=time_budget_sec,
        tag="harness",
    )
    return code


run_agent = run_command
"""Upstream's name. `slime.agent.harness.run_agent` is another function, of this project."""


async def install(sb: Sandbox, program: str, archive: str) -> None:
    """Installs the npm package that the setting `archive` names (SLIME_AGENT_CC_TARBALL for "CC_TARBALL"), unless the
    sandbox has the program. If SLIME_AGENT_NODE_TARBALL is set, it installs this Node first. Raises ValueError if the
    sandbox lacks the program and the setting is missing."""
    code, _, _ = await sb.exec(f"command -v {program}")
    if code == 0:
        return
    package, node = setting(archive), setting("NODE_TARBALL")
    if package is None:
        raise ValueError(
            f"{program} must be in the sandbox, or SLIME_AGENT_{archive} must name its npm package, got neither; "
            "take an image that has it, or export the variable"
        )
    if node is not None:
        await install_node22(sb, Path(node))
    await _install_package(sb, Path(package), f"command -v {program}")


async def install_npm_cli(sb: Sandbox, *, node_runtime: Path, npm_package: Path, check_cmd: str) -> None:
    """Installs Node and an npm package from files of this host, and runs `check_cmd`. Raises RuntimeError if one
    fails."""
    await install_node22(sb, node_runtime)
    await _install_package(sb, npm_package, check_cmd)


async def install_node22(sb: Sandbox, host_tarball: Path) -> None:
    """Installs Node from its archive on this host. The sandbox needs xz for an archive that ends in .xz."""
    await sb.write_file(_NODE_FILE, Path(host_tarball))
    unpack = f"mkdir -p {_NODE} && tar -xf {_NODE_FILE} -C {_NODE} --strip-components=1"
    await sb.exec(f"{unpack} && ln -sf {_NODE}/bin/* /usr/local/bin/", check=True, timeout=_INSTALL_S)


async def _install_package(sb: Sandbox, npm_package: Path, check_cmd: str) -> None:
    await sb.write_file(_AGENT_FILE, Path(npm_package))
    await sb.exec(
        f"npm install --global --prefix /usr/local {_AGENT_FILE} && {check_cmd}",
        check=True,
        timeout=_INSTALL_S,
    )


def get_environment(ctx: HarnessContext) -> dict[str, str]:
    return endpoint(ctx.adapter_url, ctx.session_id)
