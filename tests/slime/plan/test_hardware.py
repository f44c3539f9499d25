"""Tests the table of GPUs, and the settings and errors of --gpu in a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_cases import good_argv

from slime.hardware import HARDWARE, find_hardware
from slime.rules import parse_args


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    """Returns flags that name neither a device nor the GPUs of a node."""
    flags = good_argv(tmp_path)
    for flag in ("--device", "--actor-num-gpus-per-node"):
        at = flags.index(flag)
        del flags[at : at + 2]
    return flags


def test_the_table_is_consistent():
    cards = {"rtx4090", "l4", "a10"}
    assert set(HARDWARE) == {"gb200", "gb300", "b300", "b200", "h200", "h100", "a100", "a100-40", *cards}
    for gpu in HARDWARE.values():
        assert 20 < gpu.memory_gib < 300 and 1e14 < gpu.bf16_flops < 5e15
        if gpu.name in cards:
            assert gpu.memory_gib < 24 and (gpu.nvlink_bytes_s, gpu.nvlink_domain, gpu.gpus_per_node) == (
                0,
                1,
                1,
            )
            assert gpu.network_bytes_s < gpu.memory_bytes_s
        else:
            assert gpu.network_bytes_s < gpu.nvlink_bytes_s < gpu.memory_bytes_s
        assert gpu.nvlink_domain % gpu.gpus_per_node == 0
        assert all(find_hardware(device) is gpu for device in gpu.devices)
    rack = {name for name, gpu in HARDWARE.items() if gpu.nvlink_domain > gpu.gpus_per_node}
    assert rack == {"gb200", "gb300"} == {name for name, gpu in HARDWARE.items() if gpu.cpu == "aarch64"}


@pytest.mark.parametrize(
    "device", ["NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA A100-PCIE-40GB", "NVIDIA A10G"]
)
def test_variants_with_other_figures_are_not_in_the_table(device):
    assert find_hardware(device) is None


@pytest.mark.parametrize(("gpu", "node"), [("gb200", 4), ("gb300", 4), ("h200", 8)])
def test_a_named_gpu_is_a_cuda_device_and_sets_the_size_of_a_node(argv, gpu, node):
    c = parse_args([*argv, "--gpu", gpu, "--actor-num-nodes", "2"])
    assert (c.cluster.gpu, c.cluster.device, c.megatron.params_dtype) == (gpu, "cuda", "bfloat16")
    assert (c.cluster.num_gpus_per_node, c.cluster.actor_num_gpus_per_node, c.world_size) == (
        node,
        node,
        2 * node,
    )


def test_what_is_given_wins_over_the_table(argv):
    c = parse_args([*argv, "--gpu", "gb200", "--num-gpus-per-node", "8"])
    assert (c.cluster.num_gpus_per_node, c.cluster.actor_num_gpus_per_node) == (8, 8)
    c = parse_args([*argv, "--gpu", "gb200", "--actor-num-gpus-per-node", "2"])
    assert (c.cluster.num_gpus_per_node, c.cluster.actor_num_gpus_per_node) == (4, 2)
    c = parse_args([*argv, "--device", "cpu"])
    assert (c.cluster.gpu, c.cluster.num_gpus_per_node, c.cluster.actor_num_gpus_per_node) == (None, 8, 8)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (
            "--gpu v100",
            "--gpu must be one of gb200, gb300, b300, b200, h200, h100, a100, a100-40, rtx4090, l4, a10, got",
        ),
        ("--gpu h200 --device cpu", "--gpu must go with --device cuda, got --gpu h200 and --device cpu"),
        (
            "--gpu gb200 --actor-num-gpus-per-node 8",
            "--actor-num-gpus-per-node must be at most --num-gpus-per-node with --gpu gb200, got 8 and 4; use more",
        ),
        (
            "--gpu gb200 --colocate --rollout-num-gpus-per-engine 6 --actor-num-nodes 3",
            "--rollout-num-gpus-per-engine must be a multiple of --num-gpus-per-node when it is larger, got 6 and 4",
        ),
        ("--nvlink-domain-size 0 --device cpu", "--nvlink-domain-size must be above 0, got 0"),
    ],
)
def test_what_does_not_go_together_is_refused(argv, flags, error):
    with pytest.raises(ValueError) as caught:
        parse_args([*argv, *flags.split()])
    assert error in str(caught.value)
