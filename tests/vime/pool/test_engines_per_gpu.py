"""Tests engines that share a GPU (--rollout-engines-per-gpu): rules, weight channel, memory and devices."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
from architectures import ARCHITECTURES
from config_cases import good_argv

from slime.cluster.placement import Node, Placement
from slime.plan.fit import MachineSizes
from vime.backends import backend_for, parse_config
from vime.memory.choose import light_config
from vime.memory.lines import remedies, whole_fit
from vime.plan.search import command as search
from vime.pool.engine_slots import EngineSlot, EngineSlots
from vime.vllm import versions
from vime.vllm.control import VllmControl
from vime.vllm.memory import engine_verdict
from vime.vllm.server import VllmServer, VllmSpec
from vime.vllm.server_flags import engine_settings

QWEN3_4B = {"model_type": "qwen3", "hidden_act": "silu", **ARCHITECTURES["qwen3-4b"].config_fields()}

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
        ("--device cuda --no-colocate --debug-train-only", "nccl"),
        (f"--device cuda {APART}", "disk"),
        (f"{APART} --update-weight-transport nccl", "nccl"),  # gloo accepts two ranks on a device
    ],
)
def test_channel(argv, flags, transport):
    c = parse_config([*argv, *flags.split(), *TWO.split()])
    assert c.weight_update.update_weight_transport == transport
    assert any("NCCL reaches one engine per GPU" in note for note in c.notes) == (
        flags == f"--device cuda {APART}"
    )


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


def test_engines_on_their_own_gpu_must_fit_it(argv):
    """Two engines with 60 GiB of KV cache each, 7.49 GiB of weights each, and 8.2 GiB for contexts and graphs."""
    flags = f"--device cuda {APART} --rollout-engines-per-gpu 2 --vllm-kv-cache-memory-bytes {60 << 30}"
    c, machine = parse_config([*argv, *flags.split()]), MachineSizes(139.8 * 2**30)
    assert whole_fit(c, QWEN3_4B, machine).worst.when == "while engines generate"
    assert whole_fit(c, QWEN3_4B, machine).over / 2**30 == pytest.approx(
        2 * (60 + 7.49) + 8.2 - 139.8, abs=0.01
    )
    assert "does not fit" in engine_verdict(c, QWEN3_4B, machine.device)
    assert any("--rollout-engines-per-gpu 1 (now 2)" in line for line in remedies(c, QWEN3_4B, machine))
    assert not any("nccl" in line for line in remedies(c, QWEN3_4B, machine))


def test_a_launcher_reads_the_flag_without_the_parser_of_vllm(argv):
    c = light_config([*argv, "--device", "cuda", *TWO.split()])
    assert (c.num_engines, c.engine.engine_facts.cache_bytes) == (4, 1 << 30)
    for wrong in ("0", "two"):
        with pytest.raises(ValueError, match="--rollout-engines-per-gpu must be"):
            light_config([*argv, "--rollout-engines-per-gpu", wrong])


def test_a_search_of_layouts_has_one_engine_per_gpu(argv, tmp_path):
    with pytest.raises(ValueError, match="--rollout-engines-per-gpu must be 1 with --search, got 2; add"):
        search.main([*argv, *TWO.split(), "--device", "cuda", "--search", "2", "--gpu", "h200"])


def test_a_dedicated_engine_has_a_whole_device(argv):
    """A run in a Ray cluster starts engines as actors. An engine that joins has its own group."""
    c = parse_config([*argv, *TWO.split()])
    placed = Placement(None, "GPU", [], {}, 1.0, [Node("here", "127.0.0.1")] * 3)
    slots = EngineSlots(
        c, "policy", lambda index: None, VllmServer, VllmControl, joined=True, colocated=False
    )
    (shares,) = {seat.options["num_gpus"] for seat in slots._seats(EngineSlot(placed, [0]))}
    (whole,) = {seat.options["num_gpus"] for seat in slots._seats(EngineSlot(placed, [0], dedicated=True))}
    assert (shares, whole) == (0.5, 1.0)


@pytest.mark.parametrize("flags", ["", "--debug-train-only"])
def test_engines_need_the_plugin(argv, monkeypatch, flags):
    monkeypatch.setattr(versions, "PLUGIN", "another")
    c = parse_config([*argv, *flags.split()])
    with nullcontext() if flags else pytest.raises(ValueError, match="vime must be installed"):
        backend_for(c).require_reachable(c)
