"""Tests engines over several nodes: each process's command line, one process that dies, and Ray's placement."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import ray
from engine_double import DoubleServer
from process_names import command_line
from ray.cluster_utils import Cluster

from slime.cluster.placement import VISIBLE_VARIABLE, reserve_devices
from slime.config import Config
from slime.config.sections.engine import EngineFacts
from vime.pool.engine_server import pair_up
from vime.pool.nodes_server import NodesServer
from vime.pool.ray_server import Seat, make_servers
from vime.pool.router import RouterSpec
from vime.vllm.pool import VllmEnginePool
from vime.vllm.server import VllmServer, VllmSpec
from vime.vllm.versions import token_routes

KEY = "nodes-key"
HOSTS = ("127.0.0.2", "127.0.0.3")
"""An address other than 127.0.0.1, which Ray replaces by another address of this host."""
ENGINE_OF_TWO_NODES = Config.from_flat(
    dict(
        device="cuda",
        actor_num_nodes=1,
        actor_num_gpus_per_node=1,
        rollout_num_gpus=4,
        rollout_num_gpus_per_engine=4,
        num_gpus_per_node=2,
        tensor_model_parallel_size=1,
        nvlink_domain_size=None,
        engine_facts=EngineFacts(),
        backend_args={},
        colocate=False,
        debug_train_only=False,
        debug_rollout_only=True,
    )
)


def spec(root: Path, **changes: object) -> VllmSpec:
    settings = {
        "model_path": "model",
        "run_key": KEY,
        "log_path": str(root / "e.log"),
        "weight_dir": str(root),
    }
    return VllmSpec(**{**settings, "start_timeout_s": 30, "tensor_parallel_size": 4, **changes})


def test_the_command_line_of_each_process(tmp_path: Path) -> None:
    """The first process is the server of a one-node engine with more flags; the other processes run workers only."""
    names = {"nnodes", "node-rank", "master-addr", "master-port", "distributed-executor-backend", "headless"}
    alone, *both = (
        VllmServer(spec(tmp_path, nodes=nodes, node=node, host=HOSTS[node], port=7000))
        for nodes, node in ((1, 0), (2, 0), (2, 1))
    )
    for server in both:
        server._master = "127.0.0.2:29500"
    common = [
        "--nnodes 2",
        "--master-addr 127.0.0.2",
        "--master-port 29500",
        "--distributed-executor-backend mp",
    ]
    wanted = [[*common, "--node-rank 0"], [*common, "--node-rank 1", "--headless"]]
    for server, ours in zip(both, wanted, strict=True):
        flags = [" ".join(tokens) for tokens in pair_up(server.command()[4:])]
        added = [flag for flag in flags if flag.split()[0].removeprefix("--") in names]
        assert sorted(added) == sorted(ours)
        routes = [] if server.spec.node == 0 else token_routes()  # only the first process answers requests
        plain = [" ".join(tokens) for tokens in pair_up(alone.command()[4:])]
        assert [flag for flag in flags if flag not in added and "--host" not in flag] == [
            flag for flag in plain if "--host" not in flag and flag not in routes
        ]
        assert f"--host {server.spec.host}" in flags
        assert server.environment()["VLLM_HOST_IP"] == server.spec.host
        assert server.environment()["GLOO_SOCKET_IFNAME"] == "lo"
        assert server.environment()["NCCL_SOCKET_IFNAME"] == "lo"
    assert [server.command()[3] for server in both] == [alone.command()[3], "vime.vllm.headless"]
    assert not names & {tokens[0].removeprefix("--") for tokens in pair_up(alone.command()[4:])}


class Broken(DoubleServer):
    """A process that ends at once."""

    def command(self) -> list[str]:
        return ["sh", "-c", "echo no GPU here; exit 7"]


def members(one: VllmSpec, *kinds: type[DoubleServer]) -> list[DoubleServer]:
    logs = [one.log_path, one.log_path.replace(".log", "-node-2.log")]
    return [
        kind(replace(one, nodes=2, node=node, log_path=logs[node], port=0)) for node, kind in enumerate(kinds)
    ]


def pool_of(root: Path, *kinds: type[DoubleServer]) -> VllmEnginePool:
    return VllmEnginePool(
        [spec(root)],
        RouterSpec(run_key=KEY, log_path=str(root / "router.log")),
        spawn=lambda one: NodesServer(members(one, *kinds)),
        health_check_interval_s=1000,
    )


@pytest.fixture
def no_process_left() -> Iterator[None]:
    before = psutil.Process().children(recursive=True)
    yield
    assert psutil.Process().children(recursive=True) == before


def test_one_lost_process_restarts_the_whole_engine(
    tmp_path: Path, no_process_left: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    pool = pool_of(tmp_path, DoubleServer, DoubleServer)
    pool.start()
    try:
        (url,) = pool.engine_urls
        started = psutil.Process().children(recursive=True)
        of_engine = [p for p in started if "engine_double" in command_line(p)]
        assert len(of_engine) == 4, "two supervisors, two processes"
        (second,) = (
            p for p in of_engine if "node-2" in command_line(p) and "supervise" not in command_line(p)
        )
        second.kill()
        end = time.monotonic() + 60
        while pool.engine_urls in ([], [url]):
            assert time.monotonic() < end, "the engine was not restarted"
            time.sleep(0.05)
        assert psutil.wait_procs(of_engine, timeout=5)[1] == [], "the first node's process was ended, too"
        assert (
            "the server process of node 2 of 2 of the engine ended with exit status 137, from SIGKILL"
            in caplog.text
        )
        pool.check_health()
    finally:
        pool.stop()


def test_a_process_that_cannot_start_is_named(tmp_path: Path, no_process_left: None) -> None:
    """The start does not wait for the first node's process, which would wait for it."""
    began = time.monotonic()
    with pytest.raises(
        RuntimeError, match=r"(?s)node 2 of 2 of the engine ended with exit status 7.*no GPU here"
    ):
        pool_of(tmp_path, Endless, Broken).start()
    assert time.monotonic() - began < 25, "less than --engine-start-timeout-s"


class Endless(DoubleServer):
    """A first process that waits for the others, as vLLM's does."""

    def command(self) -> list[str]:
        return ["sleep", "600"]


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Starts a Ray with two GPUs on each of two loopback addresses; the GPUs do not exist."""
    monkeypatch.delenv(VISIBLE_VARIABLE, raising=False)
    memory = {"object_store_memory": 80 << 20}
    head = {"num_cpus": 1, "num_gpus": 2, "include_dashboard": False, "node_ip_address": HOSTS[0], **memory}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=1, num_gpus=2, node_ip_address=HOSTS[1], **memory)
    ray.init(address=cluster.address, log_to_driver=False, _node_ip_address=HOSTS[0])
    yield
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.slow
def test_ray_puts_each_process_on_its_node(two_nodes: None, tmp_path: Path) -> None:
    """An engine of four GPUs runs on two nodes of two. Each process gets its node's address and GPUs."""
    placed = reserve_devices(ENGINE_OF_TWO_NODES)
    (bundles,) = placed.engine_bundles["policy"]
    parts = placed.by_node(bundles)
    assert [[placed.nodes[bundle].address for bundle in part] for part in parts] == [[h, h] for h in HOSTS]
    seats = [
        Seat(placed.nodes[p[0]].address, placed.visible(p), placed.buses(p), placed.options(p[0]))
        for p in parts
    ]
    engine = make_servers(spec(tmp_path, env={"KEPT": "1"}), seats, here=False, server=VllmServer)
    assert isinstance(engine, NodesServer)
    for node, member in enumerate(engine._members):
        where, told = ray.get(
            member._actor.__ray_call__.remote(lambda self: (ray.util.get_node_ip_address(), self.spec))
        )
        assert where == told.host == HOSTS[node] and (told.node, told.nodes) == (node, 2)
        assert told.env == {"KEPT": "1", VISIBLE_VARIABLE: "0,1"}
        assert Path(told.log_path).name == ("e.log", "e-node-2.log")[node]
    host, _, port = engine._members[0].meeting_point().partition(":")
    assert host == HOSTS[0] and int(port) > 0
    alone = make_servers(spec(tmp_path), seats[:1], here=False, server=VllmServer)
    assert not isinstance(alone, NodesServer), "an engine of one node is one actor, as before"
    placed.release()


def test_the_driver_itself_starts_servers_of_its_host(tmp_path: Path) -> None:
    """There is no cluster of Ray. The server sees the GPUs of its slot."""
    seat = Seat(HOSTS[0], {VISIBLE_VARIABLE: "2,3"}, ("0000:01:00.0",), {"num_gpus": 1})
    alone = make_servers(spec(tmp_path, env={"KEPT": "1"}), [seat], here=True, server=VllmServer)
    assert isinstance(alone, VllmServer)
    assert alone.spec.env == {"KEPT": "1", VISIBLE_VARIABLE: "2,3"} and alone.spec.gpu_buses == seat.gpu_buses
    assert alone.environment()[VISIBLE_VARIABLE] == "2,3"
    both = make_servers(spec(tmp_path), [seat, seat], here=True, server=VllmServer)
    assert isinstance(both, NodesServer) and [m.spec.node for m in both._members] == [0, 1]
