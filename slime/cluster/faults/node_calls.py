"""Calls functions on nodes of the Ray cluster: in this process for its own node, in a task for another node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import ray
from ray.exceptions import RaySystemError, TaskUnschedulableError, WorkerCrashedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.cluster.calls import Ref

T = TypeVar("T")
_TASK_S = 30.0
"""Seconds in which Ray starts a task, in addition to the limit of a call."""


def call_on_nodes(calls: Mapping[str, Callable[[], T]], limit_s: float) -> dict[str, T]:
    """Returns the result of each node's call. A node that is lost, or does not answer in time, has no result. Raises
    the errors of the calls."""
    own = ray.get_runtime_context().get_node_id()
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
    refs = {_start(node, call): node for node, call in calls.items() if node != own and node in alive}
    results = {own: calls[own]()} if own in calls else {}
    ended, _ = ray.wait(list(refs), num_returns=len(refs), timeout=limit_s + _TASK_S) if refs else ([], [])
    for ref in ended:
        try:
            results[refs[ref]] = ray.get(ref)
        except (RaySystemError, WorkerCrashedError, TaskUnschedulableError):  # the node was lost meanwhile
            continue
    return results


def _start(node: str, call: Callable[[], object]) -> Ref:
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    task = _call.options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    ref: Ref = task.remote(call)
    return ref


@ray.remote
def _call(call: Callable[[], object]) -> object:
    return call()
