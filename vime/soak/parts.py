"""The parts of a run that a soak kills and measures, and their processes.

A soak searches only the descendants of the command's process (`Descendants`). It adopts processes whose parent was
killed, so the descendants are all processes that its run has started, and no others.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Mapping

import psutil

from slime.config import Config

PARTS = {
    "engine": r"^\S+ -m vime\.(vllm|sglang)\.serve (?!--standby)",
    "router": r"^\S+ -m vime\.(vllm|sglang)\.router_main",
    "trainer": r"^ray::TrainerActor",
    "manager": r"^ray::RolloutActor",
    "driver": r"^\S+ -P -m vime train ",
    "raylet": r"^\S*raylet/raylet ",
    "gcs": r"^\S*gcs/gcs_server ",
}
"""Part -> pattern of the command line of its first process. Ray's actors set their titles."""
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


def find_absent(config: Config, part: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns the reason why the run of `config` does not start `part`, or None if it starts it."""
    if part in ("engine", "router"):
        if config.num_engines == 0:
            return "the run has no engines (--debug-train-only)"
        if part == "engine" and config.rollout.rollout_external_engine_addrs:
            return "the engines of --rollout-external-engine-addrs are not the run's own"
        if part == "router" and config.engine.router_ip is not None:
            return f"the router at {config.engine.router_ip} is not the run's own"
    if environ.get("RAY_ADDRESS") and part not in ("driver", "router"):
        return f"it belongs to the cluster at RAY_ADDRESS={environ['RAY_ADDRESS']}, which another command started"
    return None


class Descendants:
    """The processes that this process starts after the creation of the object, and their descendants.

    Until `end`, a process whose parent was killed becomes a child of this process.
    """

    def __init__(self) -> None:
        self._before = set(psutil.Process().children(recursive=True))
        self._set_subreaper(True)

    def members(self) -> list[psutil.Process]:
        """Returns the running processes, in the order of their start."""
        found = set(psutil.Process().children(recursive=True)) - self._before
        return sorted(found, key=lambda process: (process.create_time(), process.pid))

    def find(self, part: str) -> list[psutil.Process]:
        """Returns the first process of each member of a part, such as each engine."""
        return [process for process in self.members() if re.search(PARTS[part], command_line(process))]

    def end(self) -> None:
        """Kills all processes, and returns when none is left."""
        while alive := self.members():
            for process in alive:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(alive, timeout=1.0)
        self._set_subreaper(False)

    def _set_subreaper(self, adopts: bool) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, int(adopts), 0, 0, 0)


def with_children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return [process, *process.children(recursive=True)]
    return [process]


def command_line(process: psutil.Process) -> str:
    """Returns the words of a process's command line, or an empty text for a process that has ended."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""
