"""Tests the channel vllm-nccl as far as a machine without GPUs can. tests/gpu/test_packed_channel_gpu.py sends
weights."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from config_cases import good_argv
from vllm.distributed.weight_transfer import nccl_common, packed_tensor

from slime.weight_sync.channel import TrainerSettings
from slime.weight_sync.registry import CHANNELS, default_channel
from vime.backends import parse_config

NAME = "vllm-nccl"


def test_the_installed_vllm_has_its_parts() -> None:
    """The same calls work with both versions of vLLM that a run may use."""
    join = inspect.signature(nccl_common.stateless_init_process_group)
    join.bind("127.0.0.1", 1, 0, 2, torch.device("cpu"))
    shared = {"iterator": 1, "group": 1, "src": 0, "buffer_size_bytes": 1, "num_buffers": 2}
    inspect.signature(packed_tensor.packed_nccl_broadcast_producer).bind(**shared, post_iter_func=1)
    consumer = inspect.signature(packed_tensor.packed_nccl_broadcast_consumer)
    consumer.bind(**shared, post_unpack_func=1, device=1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "cpu"], f"--update-weight-transport {NAME} must have trainer and engines on GPUs"),
        (
            ["--device", "cuda", "--update-weight-mode", "delta"],
            f"--update-weight-mode must be full with --update-weight-transport {NAME}, got delta",
        ),
        (
            ["--device", "cuda", "--vllm-data-parallel-size", "2", "--rollout-num-gpus-per-engine", "2"],
            f"--update-weight-transport {NAME} must go with engines that are tensor parallel only",
        ),
    ],
)
def test_bad_flags(tmp_path: Path, flags: list[str], message: str) -> None:
    argv = [token for token in good_argv(tmp_path) if token != "--colocate"]
    with pytest.raises(ValueError) as error:
        parse_config([*argv, "--rollout-num-gpus", "2", "--update-weight-transport", NAME, *flags])
    assert message in str(error.value)


def test_it_is_never_the_default_and_refuses_cpus(tmp_path: Path) -> None:
    assert NAME not in {default_channel(gpus) for gpus in ("shared", "apart", None)}
    settings = TrainerSettings(tmp_path, 1, torch.device("cpu"), 1)
    with pytest.raises(ValueError, match=f"--update-weight-transport {NAME} must run on GPUs, got cpu"):
        CHANNELS[NAME].load().on_trainer(settings)
