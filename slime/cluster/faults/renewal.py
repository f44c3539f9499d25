"""Finds new devices for trainer ranks whose node was lost.

Ray moves the bundles of a lost node to free devices of other nodes. The bundles of other nodes, with their engines,
stay where they are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import ray

from slime.cluster.placement import Placement, find_gpus, find_nodes
from slime.cluster.ray_watch import parts
from slime.config import Config

_MOVED_S = 60
"""Seconds in which Ray must have moved the bundles."""


def find_engine_nodes(placed: Placement) -> set[str]:
    """Returns Ray's ids of the nodes that have engines."""
    engines = (bundles for every in placed.engine_bundles.values() for bundles in every)
    return {placed.nodes[bundle].name for bundles in engines for bundle in bundles}


def describe_memory(config: Config, placed: Placement) -> str | None:
    """Returns a note for --recover-from memory if the loss of a node would lose states, or None."""
    ranks = {placed.nodes[bundle].name for bundles in placed.trainer_bundles for bundle in bundles}
    if config.fault_tolerance.recover_from != "memory" or len(ranks) > 1 or len(_find_alive()) == 1:
        return None
    return (
        "all trainer ranks are on one node, so --recover-from memory has no copy on another node; if this node is "
        "lost, the run ends, and its command resumes it from --save"
    )


def renew(placed: Placement) -> Placement:
    """Returns the placement with the present nodes and GPUs of the trainer's bundles. Raises RuntimeError if the
    devices of a lost node have no replacement."""
    used = {placed.nodes[bundle].name for bundles in placed.trainer_bundles for bundle in bundles}
    lost = _find_lost(used)
    if not lost:
        return placed
    gone = {
        bundle
        for bundles in placed.trainer_bundles
        for bundle in bundles
        if placed.nodes[bundle].name in lost
    }
    if not placed.group.wait(_MOVED_S):
        raise RuntimeError(
            f"{len(gone)} devices must be free within {_MOVED_S} s for the trainer ranks of a lost node, got too few "
            "in the cluster; add a node, and give the same command again: with --load it resumes from the last "
            "checkpoint"
        )
    nodes, gpus = list(placed.nodes), list(placed.gpus)
    found = find_nodes(placed.group, len(nodes))
    for bundle in gone:
        nodes[bundle] = found[bundle]
    if gpus:
        moved = sorted(gone)
        for bundle, gpu in zip(moved, find_gpus(placed.group, moved), strict=True):
            gpus[bundle] = gpu

    def reorder(bundles: Sequence[int]) -> list[int]:
        """Sorts the moved bundles of a group, so that neighbouring ranks have neighbouring devices."""
        moved = iter(sorted(set(bundles) & gone, key=lambda bundle: (gpus or nodes)[bundle].order))
        return [next(moved) if bundle in gone else bundle for bundle in bundles]

    trainers = [reorder(bundles) for bundles in placed.trainer_bundles]
    return replace(placed, nodes=nodes, gpus=gpus, trainer_bundles=trainers)


def _find_lost(used: set[str]) -> set[str]:
    """Returns the nodes among `used` that Ray reports as lost. Ray reports a node some seconds after its raylet has
    ended, so the function waits for a node whose raylet does not listen."""
    end = time.monotonic() + _MOVED_S
    while True:
        alive = _find_alive()
        raylets = [part for part in parts(used & alive) if part.name.startswith("Ray's raylet")]
        if all(raylet.listens() for raylet in raylets) or time.monotonic() > end:
            return used - alive
        time.sleep(0.5)


def _find_alive() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
