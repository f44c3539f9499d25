"""Tests `vime plan --gpu NAME`: that GPU's memory decides, and a section shows its figures and their consequences."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from architectures import ARCHITECTURES

from slime.hardware import HARDWARE
from slime.plan.flops import ForwardFlops
from slime.plan.model_shape import Shape
from slime.plan.units import GIB
from vime.cli import main

ROOT = Path(__file__).parents[3]
QWEN3_4B = {"model_type": "qwen3", "hidden_act": "silu", **ARCHITECTURES["qwen3-4b"].config_fields()}
FLAGS = """
--hf-checkpoint {dir} --prompt-data {dir}/p.jsonl --num-rollout 1 --rollout-batch-size 32 --n-samples-per-prompt 8
--rollout-max-response-len 8192 --use-dynamic-batch-size --max-tokens-per-gpu 9216 --recompute-granularity full
--recompute-method uniform --recompute-num-layers 1 --vllm-server-concurrency 256 --actor-num-gpus-per-node 1
"""
COLOCATED = ("--colocate", "--vllm-gpu-memory-utilization", "0.4")
APART = ("--rollout-num-gpus", "1", "--vllm-gpu-memory-utilization", "0.85")


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Returns flags of a Qwen3-4B run without a device."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    (tmp_path / "p.jsonl").write_text('{"input": "1+1=", "label": "2"}\n' * 64)
    return FLAGS.format(dir=tmp_path).split()


def section(text: str, title: str) -> list[str]:
    """Returns the lines of a section of a printed plan."""
    found = re.search(rf"^{title}\n((?:  .*\n)+)", text, re.M)
    assert found, text
    return [line[2:] for line in found[1].splitlines()]


def test_the_memory_of_the_named_gpu_decides(flags, capsys):
    assert main(["plan", *flags, *COLOCATED, "--gpu", "h200"]) == 0
    named = capsys.readouterr().out
    assert named.count("fits a GPU of 139.8 GiB") == 2
    assert main(["plan", *flags, *COLOCATED, "--gpu-memory-gib", "139.8"]) == 0
    sized = capsys.readouterr().out
    for title in ("Memory of a trainer rank", "Memory of an engine, per GPU", "Batches"):
        assert section(named, title) == section(sized, title)
    assert "Hardware" not in sized


def test_a_layout_that_is_too_large_ends_with_status_1(flags, capsys):
    large = [*flags, *APART, "--max-tokens-per-gpu", "65536"]
    assert main(["plan", *large, "--gpu", "a100"]) == 1
    assert "does not fit a GPU of 79.15 GiB" in capsys.readouterr().out
    assert main(["plan", *large, "--gpu", "a100", "--gpu-memory-gib", "1000"]) == 0, (
        "the size that is given wins"
    )
    assert section(capsys.readouterr().out, "Hardware")[0].startswith(
        "a100: 79.15 GiB for CUDA at 2.039 TB/s"
    )


def test_the_section_shows_the_figures_and_the_layout(flags, capsys):
    assert main(["plan", *flags, *APART, "--gpu", "gb200"]) == 0
    first, links, update, training = section(capsys.readouterr().out, "Hardware")
    assert first == (
        "gb200: 184.31 GiB for CUDA at 8 TB/s, 2500 TFLOP/s in dense bfloat16; the host's CPU is aarch64"
    )
    assert links == "in each direction: NVLink 900 GB/s among 72 GPUs, network 50 GB/s a GPU; 4 GPUs per node"
    size = Shape.of(QWEN3_4B).params * 2
    assert update == (
        f"lower bound of a weight update: {size / GIB:.2f} GiB / 900 GB/s (NVLink) = {size / 900e9:.3g} s"
    )
    rate = re.search(r"= ([\d,]+) tokens/s", training)[1]
    assert int(rate.replace(",", "")) == round(2.5e15 / (3 * ForwardFlops(QWEN3_4B)(1, 0)))


@pytest.mark.parametrize(
    ("layout", "link", "speed"),
    [
        (("--colocate", "--vllm-gpu-memory-utilization", "0.4"), "the GPU's memory", 4.8e12),
        (("--rollout-num-gpus", "7"), "NVLink", 450e9),  # 1 + 7 GPUs are one domain
        (("--rollout-num-gpus", "8"), "network of one GPU", 50e9),
        (("--rollout-num-gpus", "8", "--nvlink-domain-size", "9"), "NVLink", 450e9),
        (("--rollout-num-gpus", "7", "--update-weight-transport", "disk"), None, None),
        (("--debug-train-only",), None, None),
    ],
)
def test_the_link_of_a_weight_update(flags, capsys, layout, link, speed):
    main(["plan", *flags, *layout, "--gpu", "h200"])
    bounds = [line for line in section(capsys.readouterr().out, "Hardware") if "weight update" in line]
    if link is None:
        assert not bounds
        return
    seconds = Shape.of(QWEN3_4B).params * 2 / speed
    assert len(bounds) == 1 and bounds[0].endswith(f"GB/s ({link}) = {seconds:.3g} s")


LARGE = """
--actor-num-nodes 8 --actor-num-gpus-per-node 8 --rollout-num-gpus 32 --rollout-num-gpus-per-engine 8
--tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
"""


@pytest.mark.parametrize("transport", ["nccl", "disk"])
def test_what_a_rank_gives_in_an_update_and_what_bounds_it(flags, tmp_path, capsys, transport):
    """Qwen3-235B runs on 64 ranks, which together send every weight once."""
    arch = {
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        **ARCHITECTURES["qwen3-235b-a22b"].config_fields(),
    }
    (tmp_path / "config.json").write_text(json.dumps(arch))
    more = ["--update-weight-transport", transport, "--weight-dir", str(tmp_path), "--gpu", "h200"]
    main(["plan", *flags, *LARGE.split(), *more])
    given, taken, time = section(capsys.readouterr().out, "Update of the engines, per trainer rank")
    whole = Shape.of(arch).params * 2
    assert given.startswith(f"a rank gives {whole / 64 / GIB:.2f} GiB of {whole / GIB:.2f} GiB: ")
    assert given.endswith("/ TP 4 / 16 copies x 2 B + experts 227 G / EP 8 / ETP 1 / 8 copies x 2 B")
    assert f"{whole / GIB:.2f} GiB" in taken
    link = "50 GB/s (network of one GPU)"
    if transport == "nccl":
        assert time.startswith(
            f"at least {whole / 50e9:.3g} s at {link}, bounded by the engines: all weights"
        )
        assert time.endswith(f"a rank's own part needs {whole / 64 / 50e9:.3g} s")
    else:
        assert time.startswith(f"at least {whole / 64 / 50e9:.3g} s for a rank to write at {link}")
        assert "bounded by the folder's file system" in time


def test_what_a_rank_keeps_and_gives_with_deltas(flags, tmp_path, capsys):
    """Qwen3-4B runs on four ranks, two of which share each shard. 1% of the values change, with two bytes for each
    position."""
    more = (
        "--actor-num-gpus-per-node 4 --rollout-num-gpus 1 --tensor-model-parallel-size 2 --sequence-parallel"
    )
    more += f" --update-weight-mode delta --weight-dir {tmp_path} --gpu h200"
    main(["plan", *flags, *more.split()])
    given, kept, delta = section(capsys.readouterr().out, "Update of the engines, per trainer rank")
    params = Shape.of(QWEN3_4B).params
    own, whole = f"{params / 2 / GIB:.2f} GiB", f"{params * 2 / GIB:.2f} GiB"
    assert given.startswith(f"a rank gives {own} of {whole}: ")
    assert f"a rank then keeps {own} in host memory, and an engine's host {whole} on its disk" in kept
    rank, total = (f"{params * share * 0.01 * 4 / 2**20:.2f} MiB" for share in (0.25, 1))
    assert f"has about {rank} of a rank and {total} of all before they are compressed: 1.01 G values" in delta


def test_no_rank_gives_slices_where_gpus_are_shared(flags, capsys):
    main(["plan", *flags, *COLOCATED, "--gpu", "h200"])
    assert "Update of the engines" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_benchmark_is_planned_for_a_named_gpu(capfd, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    line = ["bench", "plan", str(ROOT / "examples/bench/qwen3-4b-gsm8k.yaml"), "--preset", "smoke"]
    assert main([*line, "--gpu", "h100"]) == 1
    out = capfd.readouterr().out
    assert out.endswith(
        f"# the flags are good, but something does not fit GPUs of {HARDWARE['h100'].memory_gib} GiB\n"
    )
    assert main([*line, "--gpu", "gb200"]) == 0
    assert "fits a GPU of 184.3 GiB" in capfd.readouterr().out
    tiny = str(ROOT / "examples/bench/tiny-cpu.yaml")
    assert main(["bench", "plan", tiny, "--gpu", "h200"]) == 2
    assert "--gpu must go with --device cuda, got --gpu h200 and --device cpu" in capfd.readouterr().err
