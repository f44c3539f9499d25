"""The folders of --recover-from memory on the nodes of the trainer's ranks."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from functools import partial
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.checkpoints.memory_files import StoredState, find_states
from slime.cluster import watchdog
from slime.cluster.calls import Actor
from slime.cluster.faults.node_calls import call_on_nodes

_ANSWER_S = 10.0


class MemoryNodes:
    """Finds the states on all nodes that have had trainer ranks, and removes them at the end. The driver removes the
    states on the driver's node."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._nodes: set[str] = set()
        self._keepers: list[Actor] = []

    def add(self, nodes: Collection[str]) -> None:
        """Adds nodes on which ranks start."""
        for node in set(nodes) - self._nodes - {ray.get_runtime_context().get_node_id()}:
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            keeper = _MemoryKeeper.options(num_cpus=0, scheduling_strategy=strategy)  # type: ignore[attr-defined]
            self._keepers.append(keeper.remote(str(Path(self._folder) / node)))
        self._nodes |= set(nodes)

    def find_states(self, role: str) -> set[StoredState]:
        """Returns the complete states of a role on all nodes that answer."""
        calls = {node: partial(find_states, Path(self._folder) / node / role) for node in self._nodes}
        return {one for found in call_on_nodes(calls, _ANSWER_S).values() for one in found}

    def close(self) -> None:
        closing: list[ray.ObjectRef[None]] = [keeper.close.remote() for keeper in self._keepers]
        # ray.get would raise the error of a lost node before the other nodes have removed their folders.
        ray.wait(closing, num_returns=len(closing), timeout=_ANSWER_S)
        for keeper in self._keepers:
            ray.kill(keeper)


@ray.remote
class _MemoryKeeper:
    """Removes the folder of its node at the end of the run. If the driver was killed, a watchdog removes it."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        # Ray kills the children of an actor that ends, so the watchdog is no child.
        command = ["setsid", "--fork", sys.executable, "-P", watchdog.__file__, str(os.getpid()), folder]
        self._watchdog = subprocess.Popen(command, stdin=subprocess.PIPE)
        self._watchdog.wait()

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # other nodes of this host have folders there
            Path(self._folder).parent.rmdir()
