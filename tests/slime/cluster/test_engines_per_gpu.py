"""Tests the rules of --rollout-engines-per-gpu, and the weight channel and the memory share of such engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_cases import good_argv

from vime.backends import backend_for, parse_config
from vime.vllm.server import VllmServer, VllmSpec
from vime.vllm.server_flags import engine_settings

TWO = "--rollout-engines-per-gpu 2 --vllm-kv-cache-memory-bytes 1073741824"
GPU = "--device cuda --rollout-batch-size 64 --n-samples-per-prompt 16 --global-batch-size 512"
APART = "--no-colocate --rollout-num-gpus 1"


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    return good_argv(tmp_path)


@pytest.mark.parametrize(
    ("flags", "transport"),
    [
        ("", "disk"),
        ("--device cuda", "ipc"),
        (f"--device cuda {APART}", "disk"),
        (f"{APART} --update-weight-transport nccl", "nccl"),  # gloo accepts two ranks on a device
    ],
)
def test_channel(argv, flags, transport):
    c = parse_config([*argv, *flags.split(), *TWO.split()])
    assert c.weight_update.update_weight_transport == transport
    assert any("NCCL reaches one engine per GPU" in note for note in c.notes) == ("cuda --no" in flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--device cuda --rollout-engines-per-gpu 2",
            "--rollout-engines-per-gpu 2 must come with --vllm-kv-cache-memory-bytes, got it without",
        ),
        (
            f"{TWO} --rollout-num-gpus-per-engine 2",
            "--rollout-engines-per-gpu must be 1 for engines of several GPUs, got 2 and --rollout-num-gpus-per-",
        ),
        (
            f"--no-colocate {TWO} --rollout-external-engine-addrs 10.0.0.1:1",
            "--rollout-engines-per-gpu must be 1 with --rollout-external-engine-addrs, got 2",
        ),
        (
            f"--device cuda {APART} {TWO} --update-weight-transport nccl",
            "--update-weight-transport nccl must reach one engine per GPU, got --rollout-engines-per-gpu 2",
        ),
        (
            "--device cuda --rollout-backend sglang --rollout-engines-per-gpu 2",
            "--rollout-engines-per-gpu must be 1 with engines of SGLang, got 2",
        ),
        (
            f"--device cuda {APART} {TWO} --prefill-num-servers 1",
            "--rollout-engines-per-gpu must be 1 with --prefill-num-servers, got 2",
        ),
        ("--rollout-engines-per-gpu 0", "--rollout-engines-per-gpu must be"),
    ],
)
def test_refused(argv, flags, message):
    with pytest.raises(ValueError) as error:
        parse_config([*argv, *flags.split()])
    assert message in str(error.value)


def test_a_note_recommends_them_for_small_models_with_many_requests(argv):
    gpu = GPU.split()
    assert any("--rollout-engines-per-gpu 4" in note for note in parse_config([*argv, *gpu]).notes)
    for flags in (TWO, "--rollout-batch-size 32", "--device cpu"):
        notes = parse_config([*argv, *gpu, *flags.split()]).notes
        assert not any("--rollout-engines-per-gpu 4" in note for note in notes)


def test_each_engine_wants_its_part_of_the_share_free(argv):
    c = parse_config([*argv, *TWO.split(), *["--device", "cuda", "--vllm-gpu-memory-utilization", "0.5"]])
    command = VllmServer(VllmSpec(**engine_settings(c), run_key="", log_path="")).command()
    shares = [command[i + 1] for i, word in enumerate(command) if word == "--gpu-memory-utilization"]
    assert (c.num_engines, shares[-1]) == (4, "0.25")
    assert any("--gpu-memory-utilization 0.25" in line for line in backend_for(c).command_lines(c))
