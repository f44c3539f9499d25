"""Tests NVLink domains: the driver's report, the order in which a run takes its GPUs, and layouts that are errors."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from config_cases import good_argv, write_model
from placement_cases import placement_config
from ray.cluster_utils import Cluster

from slime.cluster.domains import arrange, compute_blocks, first_straddling, split_domains
from slime.cluster.gpu_facts import GpuFacts, parse, read_gpu_facts
from slime.cluster.placement import VISIBLE_VARIABLE, Gpu, _ordered, reserve_devices
from slime.rules import parse_args

RACK_A, RACK_B = "a1000000-0000-0000-0000-000000000001.0", "b1000000-0000-0000-0000-000000000001.0"


def racks(nodes_of: dict[str, int], per_node: int = 4) -> list[Gpu]:
    """Returns GPUs of racks whose nodes have interleaved addresses, in random order, because Ray may choose any
    bundle order."""
    left = dict(nodes_of)
    gpus, address = [], 1
    while any(left.values()):
        for rack in left:
            if left[rack]:
                left[rack] -= 1
                place, address = f"10.0.{address // 200}.{address % 200}", address + 1
                gpus += [Gpu(f"node-{place}", place, str(i), GpuFacts(domain=rack)) for i in range(per_node)]
    random.Random(7).shuffle(gpus)
    return gpus


def groups(gpus: list[Gpu], blocks: list[int], size: int | None = None) -> list[list[Gpu]]:
    """Returns the GPUs per block, as the run takes them."""
    order, _ = _ordered(gpus, blocks, size)
    assert sorted(order) == list(range(len(gpus)))
    starts = [sum(blocks[:i]) for i in range(len(blocks))]
    return [[gpus[b] for b in order[at : at + n]] for at, n in zip(starts, blocks, strict=True)]


def racks_of(group: list[Gpu]) -> set[str]:
    return {gpu.facts.domain for gpu in group}


def nodes_of(group: list[Gpu]) -> set[str]:
    return {gpu.node for gpu in group}


def test_two_nvl72_racks_whose_nodes_ray_interleaves():
    gpus = racks({RACK_A: 18, RACK_B: 18})
    blocks = compute_blocks(64, 8, 10, 8, colocate=False)
    found = groups(gpus, blocks)
    assert len(gpus) == 144 and blocks == [8] * 18
    assert all(len(racks_of(group)) == 1 and len(nodes_of(group)) == 2 for group in found)
    assert [racks_of(group) for group in found] == [{RACK_A}] * 9 + [{RACK_B}] * 9
    by_number = [(gpu.address, gpu.name) for gpu in found[0]]
    assert [name for _, name in by_number] == list("01230123"), "neighbours are GPUs of whole nodes"


def test_racks_of_which_a_run_has_parts():
    """The racks have 15 and 3 nodes. A group that starts on the first rack's remaining nodes would end on the second
    rack."""
    found = groups(racks({RACK_A: 15, RACK_B: 3}), [16] * 3 + [8, 4, 8, 4])
    assert all(len(racks_of(group)) == 1 for group in found)
    assert [racks_of(group) for group in found[3:]] == [{RACK_A}, {RACK_A}, {RACK_B}, {RACK_B}]


def test_an_engine_takes_one_node_where_one_has_room():
    """After two trainer ranks on the first node, an engine of four starts on the second."""
    gpus = racks({RACK_A: 3})
    found = groups(gpus, [1, 1, 4, 4, 2])
    assert [len(nodes_of(group)) for group in found] == [1] * 5
    assert nodes_of(found[0]) == nodes_of(found[1]) == nodes_of(found[4])


def test_an_engine_larger_than_a_domain_is_whole_nodes():
    gpus = racks({"": 3}, per_node=8)  # without a fabric, each node is a domain
    found = groups(gpus, [4, 16, 4])
    assert len(nodes_of(found[1])) == 2 and nodes_of(found[0]) == nodes_of(found[2])
    assert not nodes_of(found[0]) & nodes_of(found[1])


def test_the_size_cuts_what_the_driver_does_not_report_and_what_it_does():
    assert split_domains([""] * 6, list("aabbcc"), None) == [("node", n) for n in "aabbcc"]
    assert split_domains([""] * 6, list("aabbcc"), 4) == [("", 0)] * 4 + [("", 1)] * 2
    assert split_domains(["x"] * 4 + ["y"] * 2, list("aabbcc"), 2) == [
        *[("x", 0)] * 2,
        *[("x", 1)] * 2,
        *[("y", 0)] * 2,
    ]
    assert split_domains(["x"] * 4 + ["y"] * 2, list("aabbcc"), None) == [*"xxxxyy"]


@pytest.mark.parametrize(
    ("layout", "blocks"),
    [
        ((8, 2, 2, 4, False), [2, 2, 2, 2, 4, 4]),
        ((8, 2, 2, 4, True), [4, 4]),
        ((8, 4, 4, 2, True), [4, 4]),
        ((3, 1, 0, 1, False), [1, 1, 1]),
        ((0, 1, 2, 4, False), [4, 4]),
        ((6, 2, 2, 3, True), [6]),
    ],
)
def test_blocks_of_a_run(layout, blocks):
    trainers, tensor, engines, per_engine, colocate = layout
    assert compute_blocks(trainers, tensor, engines, per_engine, colocate=colocate) == blocks


@pytest.mark.parametrize("seed", range(20))
def test_every_gpu_is_taken_once_whatever_the_blocks(seed):
    rng = random.Random(seed)
    nodes = sorted(rng.choices("abcdef", k=24))
    blocks = []
    while sum(blocks) < 24:
        blocks.append(min(rng.choice([1, 2, 3, 4, 8, 16]), 24 - sum(blocks)))
    assert sorted(arrange(nodes, nodes, blocks)) == list(range(24))


def test_the_first_group_that_straddles():
    assert first_straddling("aabb", 2) is None and first_straddling("", 2) is None
    assert first_straddling("aaabbb", 2) == 1 and first_straddling("aab", 4) == 0


QUERY = """
==============NVSMI LOG==============

Driver Version                            : 580.159.04
Attached GPUs                             : 4
GPU 00000008:01:00.0
    Product Name                          : NVIDIA GB200
    Fabric
        State                             : {state}
        Status                            : Success
        CliqueId                          : {clique}
        ClusterUUID                       : {cluster}
        Health
            Bandwidth                     : Full
"""


@pytest.mark.parametrize(
    ("cluster", "clique", "domain"),
    [
        ("c0ffee00-1111-2222-3333-444444444444", "32766", "c0ffee00-1111-2222-3333-444444444444.32766"),
        ("00000000-0000-0000-0000-000000000000", "0", ""),
    ],
)
def test_what_the_driver_reports(cluster, clique, domain):
    text = QUERY.format(state="Completed", cluster=cluster, clique=clique)
    assert parse(text) == GpuFacts("0008:01:00.0", domain)
    assert parse(text.replace("Completed", "In Progress")) == GpuFacts("0008:01:00.0", "")


def test_a_driver_of_a_host_without_a_fabric_reports_none():
    """The text is that of an H100's driver in a virtual machine, 580.159.04."""
    text = QUERY.format(state="N/A", cluster="N/A", clique="N/A").replace("Success", "N/A")
    assert parse(text) == GpuFacts("0008:01:00.0", "")
    assert parse("GPU 00000000:00:06.0\n    Product Name : Tesla\n") == GpuFacts("0000:00:06.0", "")


def fake_smi(folder: Path, body: str) -> None:
    folder.mkdir(exist_ok=True)
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)


def test_a_driver_that_fails_is_an_error_and_none_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_gpu_facts("0") == GpuFacts()
    fake_smi(tmp_path, "echo 'No devices were found'; exit 6")
    with pytest.raises(
        RuntimeError, match="-i 0 must succeed, got exit status 6: No devices were found; check"
    ):
        read_gpu_facts("0")


@pytest.fixture
def two_racks(monkeypatch, tmp_path) -> Iterator[None]:
    """Starts a Ray with four nodes of two GPUs on this host. A program that replaces nvidia-smi answers that the
    nodes belong to two racks in turns."""
    text = QUERY.format(state="Completed", clique="1", cluster="$rack")
    fake_smi(tmp_path / "bin", f'case "$3" in GPU-a*) rack={RACK_A[:-2]};; *) rack={RACK_B[:-2]};; esac\n'
             f"cat <<END\n{text}\nEND")  # fmt: skip
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    memory = {"object_store_memory": 80 * 2**20}
    names = [f"GPU-{rack}{n}0,GPU-{rack}{n}1" for n, rack in enumerate("abab")]
    monkeypatch.setenv(VISIBLE_VARIABLE, names[0])
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "num_gpus": 2, "include_dashboard": False, **memory},
    )
    for visible in names[1:]:
        monkeypatch.setenv(VISIBLE_VARIABLE, visible)
        cluster.add_node(num_cpus=1, num_gpus=2, **memory)
    ray.init(address=cluster.address, log_to_driver=False)
    yield
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.slow
def test_a_run_on_two_racks(two_racks):
    flags = {"actor_num_gpus_per_node": 4, "rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2}
    placed = reserve_devices(placement_config("cuda", tensor_model_parallel_size=4, **flags))
    try:
        racks_of_trainer = {placed.gpus[b].facts.domain for b in placed.trainer_bundles[0]}
        assert (
            len(racks_of_trainer) == 1 and len({placed.gpus[b].node for b in placed.trainer_bundles[0]}) == 2
        )
        for bundles in placed.engine_bundles["policy"]:
            assert len({placed.gpus[b].node for b in bundles}) == 1
    finally:
        placed.release()
    with pytest.raises(ValueError) as caught:
        reserve_devices(
            placement_config(
                "cuda", actor_num_gpus_per_node=8, debug_train_only=True, tensor_model_parallel_size=8
            )
        )
    assert (
        "a tensor-parallel group of 8 GPUs (--tensor-model-parallel-size) must be inside one NVLink domain, got "
        "group 0 on 2 domains (4 + 4 GPUs), and this run has 4 + 4 GPUs on its domains; give every domain "
        "a multiple of 8 GPUs"
    ) in str(caught.value)


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    flags = good_argv(tmp_path)
    for flag in ("--device", "--actor-num-gpus-per-node"):
        at = flags.index(flag)
        del flags[at : at + 2]
    return [*flags, "--micro-batch-size", "1", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "64"]


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (
            "--gpu h200 --actor-num-nodes 2 --tensor-model-parallel-size 16",
            "--tensor-model-parallel-size must be at most the GPUs of an NVLink domain, got 16 and 8; lower it, or set",
        ),
        (
            "--gpu gb200 --actor-num-nodes 20 --tensor-model-parallel-size 16",
            "--tensor-model-parallel-size must divide the GPUs of an NVLink domain where a run needs several, got 16 "
            "and 72 = 4 x 16 + 8 with 80 GPUs; lower it",
        ),
        (
            "--device cuda --nvlink-domain-size 2 --actor-num-gpus-per-node 4 --rollout-num-gpus-per-engine 4",
            "the tensor-parallel size of an engine (--rollout-num-gpus-per-engine) must be at most the GPUs of an "
            "NVLink domain, got 4 and 2",
        ),
    ],
)
def test_layouts_that_no_domain_has_room_for(argv, flags, error):
    with pytest.raises(ValueError) as caught:
        parse_args([*argv, *flags.split()])
    assert error in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        "--gpu gb200 --actor-num-nodes 4 --tensor-model-parallel-size 16",  # one domain of 72
        "--gpu gb200 --actor-num-nodes 20 --tensor-model-parallel-size 16 --nvlink-domain-size 64",
        # The domains are unknown.
        "--device cuda --actor-num-gpus-per-node 16 --tensor-model-parallel-size 16",
    ],
)
def test_layouts_that_fit(argv, flags, tmp_path):
    write_model(tmp_path / "model", num_attention_heads=16, num_key_value_heads=16)
    c = parse_args([*argv, "--global-batch-size", "16", *flags.split()])
    assert c.megatron.tensor_model_parallel_size == 16
