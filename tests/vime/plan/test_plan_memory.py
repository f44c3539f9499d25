"""Tests `vime plan --gpu-memory-gib N`: the decisions for a GPU of another machine, and engine flags that are given
twice."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES

from slime.plan.memory_estimate import estimate
from slime.plan.model_shape import Shape
from slime.plan.units import GIB, amount
from slime.system import delta_nets
from vime.backends import parse_config
from vime.cli import main, usage
from vime.memory import sizes
from vime.memory.lines import memory_in_short
from vime.vllm.memory import activations, engine_memory, engine_verdict
from vime.vllm.server import VllmServer, VllmSpec
from vime.vllm.server_flags import VLLM, engine_settings, starts_empty

QWEN3_4B = {"model_type": "qwen3", "hidden_act": "silu", **ARCHITECTURES["qwen3-4b"].config_fields()}
FLAGS = """
--hf-checkpoint {dir} --prompt-data {dir}/p.jsonl --num-rollout 1 --device cuda --actor-num-gpus-per-node 1
--num-gpus-per-node 2 --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192
--use-dynamic-batch-size --max-tokens-per-gpu 9216 --recompute-granularity full --recompute-method uniform
--recompute-num-layers 1 --vllm-server-concurrency 256
"""
COLOCATED = ("--colocate", "--vllm-gpu-memory-utilization", "0.4")
PER_ENGINE = ("--rollout-num-gpus-per-engine", "4", "--num-gpus-per-node", "5")
APART = ("--rollout-num-gpus", "1", "--vllm-gpu-memory-utilization", "0.85")
TRAINER, ENGINE = "Memory of a trainer rank", "Memory of an engine, per GPU"


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Returns flags of a Qwen3-4B run without placement."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    (tmp_path / "p.jsonl").write_text('{"input": "1+1=", "label": "2"}\n' * 64)
    return FLAGS.format(dir=tmp_path).split()


def parts(capsys, *argv: str) -> dict[str, list[str]]:
    """Returns the parts of a printed plan by their titles."""
    status = main(["plan", *argv])
    said = capsys.readouterr()
    asked = any(word.startswith(("--gpu-memory", "--gpu_memory", "--host-memory")) for word in argv)
    assert status == (asked and "does not fit" in said.out), said.err
    found: dict[str, list[str]] = {}
    title = ""
    for line in said.out.splitlines():
        if line.startswith("  "):
            found[title].append(line[2:])
        else:
            title = line
            found[title] = []
    return found


def test_a_colocated_plan_decides_for_the_gpu_that_is_named(flags, capsys):
    found = parts(capsys, *flags, *COLOCATED, "--gpu-memory-gib", "140.4")
    assert found[TRAINER][-6:] == [
        "between trainings the trainer's state stays on the device (to save memory)",
        "while it loads 70.38 GiB of 140.40 GiB: 68.88 GiB of tensors, 1.50 GiB besides",
        "while engines generate 132.54 GiB of 140.40 GiB: 68.88 GiB of the trainer, 0.4 of the GPU for the engine, "
        "7.50 GiB besides",
        "while weights are handed over 81.07 GiB of 140.40 GiB: 68.88 GiB of the trainer, 7.49 GiB of the engine's "
        "weights, 4.70 GiB besides",
        "while it trains 76.97 GiB of 140.40 GiB: 72.05 GiB of tensors, a sleeping engine's and its own 4.70 GiB "
        "besides, 227.22 MiB of gaps between tensors",
        "fits a GPU of 140.4 GiB",
    ]
    assert "What would make it fit" not in found
    found = parts(capsys, "--gpu-memory-gib=60", *flags, *COLOCATED)
    assert found[TRAINER][-6].startswith("between trainings gradients, optimizer leave the device")
    assert found[TRAINER][-1].startswith(
        "does not fit a GPU of 60 GiB: 10.38 GiB too much while it loads; 16.97 GiB"
    )
    assert found["What would make it fit"][0].startswith(
        "--optimizer-cpu-offload --optimizer-offload-fraction 0.4 (now 0) gives "
    )
    found = parts(capsys, *flags, *COLOCATED, "--gpu_memory_gib", "60", "--gpu-memory-gib", "80")
    assert found[TRAINER][-1] == "fits a GPU of 80 GiB"


def test_a_plan_adds_up_the_host_and_compares_it(flags, capsys):
    """Adam takes 45 GiB on the host, so a host of 60 GiB is too small for any GPU."""
    argv = (*flags, *COLOCATED, "--gpu-memory-gib", "140.4", "--optimizer-cpu-offload")
    found = parts(capsys, *argv, "--host-memory-gib", "503")
    host = found["Memory of a host"]
    assert [line.split("  ")[0] for line in host[:3]] == ["system", "trainers", "Adam on the host"]
    assert host[-2].startswith("together ") and host[-2].endswith("while it loads, without page cache")
    assert host[-1] == "fits a host of 503 GiB, of which a plan fills 93%"
    names = [line[:14].strip() for line in found["Memory by phase"]]
    assert (
        names
        == ["", "loading", "first weights", "generating", "hand-over", "training", "saving"][: len(names)]
    )
    found = parts(capsys, *argv, "--host-memory-gib=60")
    assert found["Memory of a host"][-1].startswith(
        "does not fit a host of 60 GiB, of which a plan fills 93%: "
    )
    assert found["What would make it fit"][0].startswith(
        "--optimizer-cpu-offload --optimizer-offload-fraction 0.8"
    )
    assert "fit" not in parts(capsys, *argv)["Memory of a host"][-1]


def test_a_plan_says_what_a_rank_reads_at_the_start(flags, capsys):
    assert parts(capsys, *flags, *COLOCATED)["Loading, per trainer rank"] == [
        "weights read            7.49 GiB   4.02 G x 2 B / TP 1",
        "host memory           805.88 MiB   weights go to the GPU; one tensor, 389 M x 2 B + 64.00 MiB of mapped files",
    ]


def test_a_disaggregated_plan_gets_both_verdicts(flags, capsys):
    found = parts(capsys, *flags, *APART, "--gpu-memory-gib", "80")
    assert found[TRAINER][-1] == "fits a GPU of 80 GiB"
    assert found[ENGINE][-1] == (
        "fits a GPU of 80 GiB: 7.49 GiB of weights and 3.40 GiB of activations in 68.00 GiB, 0.85 of it, at most "
        "57.11 GiB for the KV cache, 50 of 256 requests of 8192 tokens at a time, the others wait"
    )
    found = parts(capsys, *flags, *APART)
    assert not any("fit" in line for title in (TRAINER, ENGINE) for line in found[title])


def test_the_gpu_that_is_here_is_the_one_without_the_option(flags, capsys, monkeypatch):
    """The test machines have no GPU, so the test replaces torch's answer."""
    monkeypatch.setattr(sizes, "device_memory", lambda c: int(140.4 * GIB))
    here = parts(capsys, *flags, *COLOCATED)
    assert here[TRAINER][-1] == "fits a GPU of 140.4 GiB" and here[ENGINE][-1].startswith(
        "fits a GPU of 140.4 GiB: "
    )
    named = parts(capsys, *flags, *COLOCATED, "--gpu-memory-gib", "80")
    assert named[TRAINER][-1] == "fits a GPU of 80 GiB" and named[ENGINE][-1].startswith(
        "fits a GPU of 80 GiB: "
    )
    short = list(memory_in_short(parse_config([*flags, *COLOCATED])))
    assert short[1:-1] == here[TRAINER][-6:] and short[-1] == f"an engine {here[ENGINE][-1]}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_in_short_says_each_decision_in_a_line(flags, capsys):
    first, *lines = memory_in_short(parse_config([*flags, *COLOCATED]))
    assert first.startswith(
        "a trainer rank 72.05 GiB at its peak; an engine, per GPU, weights 7.49 GiB, KV cache per"
    )
    assert lines == parts(capsys, *flags, *COLOCATED)[TRAINER][-len(lines) :]
    assert lines[0].endswith("here it is not:") and lines[1] == "  from 127.30 GiB on: nothing"


@pytest.mark.parametrize(
    ("size", "engine", "said"),
    [
        (
            80,
            "",
            "in 73.60 GiB, 0.92 of it, at most 62.71 GiB for the KV cache, 55 of 256 requests of 8192 tokens",
        ),
        (400, "", "357.11 GiB for the KV cache, enough for 256 requests of 8192 tokens"),
        (
            8,
            "",
            "in 7.36 GiB, 0.92 of it, 1.08 GiB too much; raise --vllm-gpu-memory-utilization (now 0.92) or --roll",
        ),
        (
            12,
            "",
            "2.60 GiB for the KV cache, but one sequence of 40960 tokens needs 5.62 GiB; raise --vllm-gpu-memory-uti",
        ),
        (
            12,
            "--vllm-max-model-len 16384",
            "2.60 GiB for the KV cache, 2 of 256 requests of 8192 tokens at a time",
        ),
        (12, "--vllm-max-model-len -1", "2.60 GiB for the KV cache, 2 of 256 requests"),
        (
            80,
            f"--vllm-kv-cache-memory-bytes {32 * GIB} --vllm-gpu-memory-utilization 0.1",
            "7.49 GiB of weights, 32.00 GiB of KV cache, 6.00 GiB besides, at most 32.00 GiB for the KV cache, 28 of",
        ),
        (
            40,
            f"--vllm-kv-cache-memory-bytes {32 * GIB}",
            f"6.00 GiB besides, 5.49 GiB too much; lower --vllm-kv-cache-memory-bytes (now {32 * GIB}) or raise --roll",
        ),
        (
            40,
            f"--vllm-kv-cache-memory-bytes {4 * GIB}",
            f"one sequence of 40960 tokens needs 5.62 GiB; raise --vllm-kv-cache-memory-bytes (now {4 * GIB}) or ",
        ),
        (
            80,
            "--rollout-num-gpus-per-engine 2 --rollout-num-gpus 2",
            "activations in 73.60 GiB, 0.92 of it, at most 66.46 GiB for the KV cache, 118 of 256 requests",
        ),
        (
            80,
            "--rollout-num-gpus-per-engine 2 --rollout-num-gpus 2 --vllm-pipeline-parallel-size 2",
            "activations in 73.60 GiB, 0.92 of it, at most 66.46 GiB for the KV cache, 118 of 256 requests",
        ),
    ],
)
def test_verdicts_of_an_engine(flags, size, engine, said):
    c = parse_config([*flags, "--num-gpus-per-node", "3", "--rollout-num-gpus", "1", *engine.split()])
    verdict = engine_verdict(c, QWEN3_4B, size * GIB)
    assert said in verdict
    wrong = "too much" in said or "one sequence" in said
    assert verdict.startswith(f"{'does not fit' if wrong else 'fits'} a GPU of {size} GiB: ")


def test_memory_of_a_pipeline_stage_of_an_engine(flags):
    stages = "--rollout-num-gpus 2 --rollout-num-gpus-per-engine 2 --vllm-pipeline-parallel-size 2"
    c = parse_config([*flags, "--num-gpus-per-node", "3", *stages.split()])
    weights, token, _ = engine_memory(c, Shape.of(QWEN3_4B))
    assert (weights.bytes, token.bytes) == (4_022_272_000, 36 * 1024 * 2)
    assert token.arithmetic == "36 layers x 2048 x 2 B / TP 1 / PP 2"


@pytest.mark.parametrize("value", ["0", "-80", "80GiB", "nan", "inf", "", None, "--device"])
def test_a_size_that_is_none_is_refused(flags, capsys, value):
    assert main(["plan", *flags, *COLOCATED, "--gpu-memory-gib", *([] if value is None else [value])]) == 2
    assert capsys.readouterr().err == (
        f"vime plan: --gpu-memory-gib must be a number above 0, got {value or 'none'}; give the GiB of memory of one "
        "GPU\n"
    )


def test_a_host_of_no_size_is_refused(flags, capsys):
    assert main(["plan", *flags, *COLOCATED, "--host-memory-gib", "none"]) == 2
    said = "--host-memory-gib must be a number above 0, got none; give the GiB of memory of one host, or "
    assert said in capsys.readouterr().err


def test_it_is_an_option_of_plans_for_gpus(flags, capsys):
    assert main(["plan", *flags, *COLOCATED, "--device", "cpu", "--gpu-memory-gib", "80"]) == 2
    assert (
        "--gpu-memory-gib must go with --device cuda, got --device cpu; leave out" in capsys.readouterr().err
    )
    without = [flag for flag in (*flags, *COLOCATED) if flag not in ("--device", "cuda")]
    assert main(["plan", *without, "--gpu-memory-gib", "80"]) == 0, "it says that the device is a GPU"
    assert "fits a GPU of 80 GiB" in capsys.readouterr().out
    assert main(["train", *flags, *COLOCATED, "--gpu-memory-gib", "80"]) == 2
    assert "vime train: --gpu-memory-gib is not a known flag" in capsys.readouterr().err
    assert "--gpu-memory-gib 80" in usage()
    for command in ("plan", "train"):
        assert main([command, "--help"]) == 0
        assert ("--gpu-memory-gib N" in capsys.readouterr().out) == (command == "plan")


def test_of_an_engine_flag_that_is_given_twice_the_last_one_is_left(flags, capsys, caplog):
    twice = (
        "--vllm-gpu-memory-utilization 0.3 --vllm-enforce-eager --vllm-no-enforce-eager --vllm-dtype float16"
    )
    argv = [*flags, *COLOCATED, *twice.split()]
    c = parse_config(argv)
    assert c.engine.backend_argv == [
        "--gpu-memory-utilization",
        "0.3",
        "--no-enforce-eager",
        "--dtype",
        "float16",
    ]
    assert c.engine.backend_args == {
        "gpu_memory_utilization": 0.3,
        "enforce_eager": False,
        "dtype": "float16",
    }
    settings = engine_settings(c) | {"starts_empty": starts_empty(c)}
    command = VllmServer(VllmSpec(**settings, run_key="k", log_path="")).command()[3:]
    told = [line.partition("vLLM ")[2].split()[0] for line in parts(capsys, *argv)["Engine flags"]]
    names = [word for word in command if word.startswith("--")]
    assert sorted([*told, "--host", "--port"]) == sorted(names) and len(names) == len(set(names))

    logger = logging.getLogger("vllm.utils.argparse_utils")
    logger.addHandler(caplog.handler)
    try:
        assert VLLM.parser().parse_args(command).gpu_memory_utilization == 0.3
        assert "Found duplicate keys" not in caplog.text
        VLLM.parser().parse_args([*command, "--dtype", "auto"])
        assert "Found duplicate keys --dtype" in caplog.text  # vLLM's own parser would log this
    finally:
        logger.removeHandler(caplog.handler)


def test_what_collects_its_values_keeps_all_of_them(flags):
    given = [
        *("--vllm-compilation-config.mode", "3", "--vllm-compilation-config.cudagraph_mode", "NONE"),
        *("--router-wasm-middleware-route", "a", "--router-wasm-middleware-route", "b"),
    ]
    c = parse_config([*flags, *COLOCATED, *given])
    assert c.engine.backend_argv[2:] == [
        "--compilation-config.mode",
        "3",
        "--compilation-config.cudagraph_mode",
        "NONE",
    ]
    assert c.engine.router_args == {"wasm_middleware_routes": ["a", "b"]}
    assert c.engine.router_argv == ["--wasm-middleware-route", "a", "--wasm-middleware-route", "b"]


QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e7,
    "max_position_embeddings": 262144,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
}
"""Qwen3-Next-80B-A3B: 36 of 48 layers are gated delta nets of 16 and 32 heads of 128."""


@pytest.mark.parametrize(
    ("more", "bytes_of_layer", "arithmetic"),
    [
        ("", 2 * 2 * (524288 + 24576), "2 x 36 layers x (524288 x 2 B + 24576 x 2 B) / 4 GPUs"),
        (
            "--vllm-no-enable-prefix-caching --vllm-mamba-ssm-cache-dtype float32",
            4 * 524288 + 2 * 24576,
            "1 x 36 layers x (524288 x 4 B + 24576 x 2 B) / 4 GPUs",
        ),
    ],
)
def test_an_engine_keeps_a_state_per_request(flags, more, bytes_of_layer, arithmetic):
    """vLLM keeps [32, 128, 128] and 3 x (2 x 2048 + 4096) numbers per layer, and twice as much with cached prefixes."""
    Path(flags[1], "config.json").write_text(json.dumps(QWEN3_NEXT))
    c = parse_config([*flags, *APART, "--rollout-num-gpus", "4", *PER_ENGINE, "--bf16", *more.split()])
    items = {item.name: item for item in engine_memory(c, Shape.of(QWEN3_NEXT))}
    state = items["state per request"]
    assert state.bytes == 36 * bytes_of_layer / 4 and state.arithmetic == arithmetic
    token = 12 * 2 * 2 * 256 * 2 / 2  # two heads of keys and values: each is on two GPUs
    assert items["KV cache"].bytes == 256 * (8192 * token + state.bytes)
    assert items["KV cache"].arithmetic.endswith("at once, with their states")
    weights = items["weights"].bytes
    room = 0.85 * 60 * GIB - weights - activations(c, Shape.of(QWEN3_NEXT), 60 * GIB)
    held = int(room / (8192 * token + state.bytes))
    assert f"{held} of 256 requests of 8192 tokens" in engine_verdict(c, QWEN3_NEXT, 60 * GIB)
    small = (weights + 262144 * token + state.bytes / 2) / 0.85
    assert "does not fit" in engine_verdict(c, QWEN3_NEXT, small)


def test_the_state_has_the_dtype_of_config_json(flags):
    """Qwen3.5's files have this field, and vLLM reads it."""
    hf = QWEN3_NEXT | {"model_type": "qwen3_5_moe_text", "mamba_ssm_dtype": "float32"}
    Path(flags[1], "config.json").write_text(json.dumps(hf))
    c = parse_config([*flags, *APART, "--bf16"])
    items = {item.name: item for item in engine_memory(c, Shape.of(hf))}
    assert items["state per request"].bytes == 36 * 2 * (4 * 524288 + 2 * 24576)


def test_a_delta_net_is_computed_again_without_its_kernels(flags, monkeypatch):
    """In plain PyTorch, the backward makes 5 x 64 x 32 + 17 x 32 x 128 + 10 x 4096 + 6 x 8192 float32 per token."""
    Path(flags[1], "config.json").write_text(json.dumps(QWEN3_NEXT))
    c = parse_config([*flags, *APART, "--bf16"])
    backward = []
    for why in ("fla-core is not installed", None):
        monkeypatch.setattr(delta_nets, "local_obstacle", lambda *, hopper, why=why: why)
        (item,) = (x for x in estimate(c, QWEN3_NEXT).work if x.name == "layers, backward")
        backward.append(item)
    made = (5 * 64 * 32 + 17 * 32 * 128 + 10 * 4096 + 6 * 8192) * 4
    assert f"{amount(9216 * made)} of its gradients" in backward[0].arithmetic
    assert backward[1].bytes < backward[0].bytes


def test_a_draft_adds_its_layers(tmp_path: Path, flags: list[str]) -> None:
    """MiMo adds a layer, its product of embedding and state, and its keys and values."""
    mimo = {"model_type": "mimo", "hidden_act": "silu", **ARCHITECTURES["mimo-7b"].config_fields()}
    (tmp_path / "config.json").write_text(json.dumps(mimo | {"num_nextn_predict_layers": 1}))
    shape = Shape.of(mimo | {"num_nextn_predict_layers": 1})
    draft = ("--vllm-speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}')
    (weights, token, _), (more, longer, _) = (
        engine_memory(parse_config([*flags, *APART, *more]), shape) for more in ((), draft)
    )
    assert more.bytes - weights.bytes == 2 * (shape.layer().total + 2 * 4096**2)
    assert longer.bytes == token.bytes * 37 / 36
