"""Every symbol of Ray that this project replaces, while it starts a cluster (slime.cluster.ray_start)."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from slime.bridges import Patch, quiet_agent

if TYPE_CHECKING:
    from ray._private.node import Node

LOOPBACK = Patch(
    symbol="ray._private.ray_constants:ENABLE_RAY_CLUSTER",
    replacement="slime.bridges.ray:disabled",
    condition="while a driver starts a cluster of its own, or joins one on loopback",
    why="ray.init replaces a loopback address with another address of the host, and Ray's servers then listen on it",
    removed_when="ray.init keeps a loopback address that it was given",
)
_COST = "Without these patches, Ray 2.60 starts about 3 s later, ends 1 s later and takes 230 MiB more"
_WHILE = "while a driver starts a cluster of its own"
PROCESSES = (
    Patch(
        symbol="ray._private.services:ConsolePopen",
        replacement="slime.bridges.ray:with_own_group",
        condition=_WHILE,
        why="a signal for the driver's process group must not end Ray before the run that needs it",
        removed_when="ray.init has a setting for the process group",
    ),
    Patch(
        symbol="ray._private.node:Node.start_api_server",
        replacement="slime.bridges.ray:without_server",
        condition=_WHILE,
        why=f"include_dashboard=False still starts a server of the dashboard. {_COST}",
        removed_when="include_dashboard=False starts no server",
    ),
    Patch(
        symbol="ray._private.node:Node.start_monitor",
        replacement="slime.bridges.ray:nothing",
        condition=_WHILE,
        why=f"a cluster of one host needs no autoscaler. {_COST}",
        removed_when="ray.init has a setting for the autoscaler",
    ),
    Patch(
        symbol="ray._private.node:Node.start_log_monitor",
        replacement="slime.bridges.ray:nothing",
        condition=_WHILE,
        why=f"the output of actors goes to files of the run. {_COST}",
        removed_when="log_to_driver=False starts no log monitor",
    ),
    Patch(
        symbol="ray._private.services:_build_python_executable_command_memory_profileable",
        replacement="slime.bridges.ray:with_quiet_agent",
        condition=_WHILE,
        why=f"the agent of the dashboard starts even without a dashboard. {_COST}",
        removed_when="include_dashboard=False starts no agent",
    ),
)
PATCHES = (LOOPBACK, *PROCESSES)


def disabled(_: bool) -> bool:
    """Returns the value that Ray has on macOS and Windows, where clusters of several hosts are disabled."""
    return False


def with_own_group(popen: Callable[..., object]) -> Callable[..., object]:
    """Returns Ray's Popen, changed to give each process a process group."""
    return functools.partial(popen, process_group=0)


def without_server(_: object) -> Callable[..., None]:
    """Returns a replacement of `Node.start_api_server` that starts no server."""

    def start_api_server(node: Node, **settings: object) -> None:
        node._webui_url = None

    return start_api_server


def nothing(_: object) -> Callable[[object], None]:
    """Returns a replacement of a method of `Node` that starts a process. The replacement does nothing."""
    return lambda node: None


def with_quiet_agent(command_of: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """Wraps Ray's function for the command of a Python process, so that the agent is
    `slime.bridges.quiet_agent`."""
    from ray._private import ray_constants

    def command(component: str, session_dir: str, *more: object, **named: object) -> list[str]:
        if component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT:
            return [sys.executable, "-P", quiet_agent.__file__]
        return command_of(component, session_dir, *more, **named)

    return command
