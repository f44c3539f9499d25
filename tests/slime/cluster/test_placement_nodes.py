"""Tests engines of several GPUs on a Ray with two nodes. Both nodes are on this host, and their GPUs do not exist.
tests/vime/pool/test_engine_nodes.py tests engines that fill several nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster

from slime.cluster.placement import VISIBLE_VARIABLE, reserve_devices
from slime.config import Config
from slime.config.sections.engine import EngineFacts

QUIET = {"include_dashboard": False, "object_store_memory": 80 * 2**20}


def engines_of_two(rollout_num_gpus: int, num_gpus_per_node: int = 8) -> Config:
    return Config.from_flat(
        dict(
            actor_num_nodes=1,
            actor_num_gpus_per_node=1,
            rollout_num_gpus=rollout_num_gpus,
            rollout_num_gpus_per_engine=2,
            num_gpus_per_node=num_gpus_per_node,
            colocate=False,
            device="cuda",
            debug_train_only=False,
            debug_rollout_only=True,
            tensor_model_parallel_size=1,
            nvlink_domain_size=None,
            engine_facts=EngineFacts(),
        )
    )


@pytest.fixture
def two_nodes(monkeypatch) -> Iterator[None]:
    """Starts a head node with one GPU, and a second node with three."""
    monkeypatch.delenv(VISIBLE_VARIABLE, raising=False)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 1, **QUIET})
    cluster.add_node(num_cpus=1, num_gpus=3, object_store_memory=QUIET["object_store_memory"])
    ray.init(address=cluster.address, log_to_driver=False)
    yield
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.slow
def test_an_engine_on_two_nodes_is_refused(two_nodes):
    with pytest.raises(ValueError) as caught:
        reserve_devices(engines_of_two(4))
    said = str(caught.value)
    assert "the GPUs of an engine (--rollout-num-gpus-per-engine 2) must be on one node, got engine " in said
    assert said.count("1 on ") == 2 and "give every node a multiple of 2 GPUs" in said
    with pytest.raises(
        ValueError, match=r"2 whole nodes \(--num-gpus-per-node 1\), got engine \d with .*[23] on "
    ):
        reserve_devices(engines_of_two(4, num_gpus_per_node=1))
    placed = reserve_devices(engines_of_two(2))
    try:  # the failed run holds no GPU, and Ray packs two onto the larger node
        (bundles,) = placed.engine_bundles["policy"]
        assert len({placed.gpus[bundle].node for bundle in bundles}) == 1
    finally:
        placed.release()
