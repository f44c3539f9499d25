"""A run that loses a node for good: its ranks start on another node, with the states from memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deadly_hooks
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from test_trainer_restarts import FLAGS, ROLLOUTS, TrainingRun
from trainer_cases import make_config

from slime.megatron_backend.checkpoint.memory_copies import choose_holders
from slime.tracking.journal import read_events

MEMORY = {"object_store_memory": 80 << 20}


def test_each_rank_has_its_copy_on_the_next_node() -> None:
    assert choose_holders(["a", "a"]) == {}
    assert choose_holders(["a", "a", "b", "b"]) == {0: 2, 1: 3, 2: 0, 3: 1}
    assert choose_holders(["b", "a", "c", "a"]) == {1: 0, 3: 0, 0: 2, 2: 1}


@ray.remote(num_cpus=0.5)
class Occupant:
    """Takes half a core, so that a node of one core has room for one rank."""

    def answer(self) -> None: ...


def occupy(node: str) -> Any:
    actor = Occupant.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
    ray.get(actor.answer.remote())
    return actor


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Starts a node for the driver, and two nodes with room for one rank each."""
    monkeypatch.setenv("PYTHONPATH", str(Path(deadly_hooks.__file__).parent))
    monkeypatch.setenv("RAY_ADDRESS", "test")
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **MEMORY}
    )
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.slow
def test_a_lost_node_loses_no_state(nodes: Cluster, root: Path, tmp_path: Path) -> None:
    ended: list[Callable[[], None]] = []
    added = [nodes.add_node(num_cpus=1, **MEMORY) for _ in range(2)]
    held = [occupy(node.node_id) for node in added]

    class LossyRun(TrainingRun):
        def publish(self, version: int) -> dict[str, float]:
            found = super().publish(version)
            if lossy and version == 2 and not ended:
                held.append(occupy(nodes.add_node(num_cpus=1, **MEMORY).node_id))
                time.sleep(2)  # the copies of this step are complete
                nodes.remove_node(added[1], allow_graceful=False)
                ended.append(lambda: None)
            return found

    results = []
    for lossy in (False, True):
        folder = tmp_path / ("lossy" if lossy else "alone")
        config = make_config(
            root,
            **FLAGS
            | {"actor_num_nodes": 2, "num_gpus_per_node": 1, "recover_from": "memory"}
            | {"run_dir": str(folder), "weight_dir": str(folder / "weights")}
            | {"memory_dir": str(folder / "memory"), "distributed_timeout_minutes": 1},
        )
        run = LossyRun(config)
        try:
            results.append(run.run())
            assert run.trained == list(range(ROLLOUTS))
            stored = {(one.rank, one.iteration) for one in run.trainers.find_states("policy")}
            assert stored == {(0, 2), (0, 3), (1, 2), (1, 3)}
        finally:
            for end in reversed(run.ends):
                end()
    assert results[0] == results[1] and ended
    (back,) = read_events(tmp_path / "lossy", ("trainer_restarted",))
    assert (back["rollout"], back["repeated"]) == (2, 0)
    print(f"back after {back['seconds']} s, load {os.getloadavg()[0]:.1f}")
    assert not (tmp_path / "lossy" / "memory").exists()
