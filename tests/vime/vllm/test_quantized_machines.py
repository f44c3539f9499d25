"""Tests which machines run a quantised checkpoint, as `vime doctor`, `vime plan` and the start of a run report it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from architectures import ARCHITECTURES
from quantization_cases import FP8, FP8_ROWS, INT4

from vime.backends import backend_for, parse_config
from vime.doctor.finding import WantedRun
from vime.doctor.machine import Machine, Output
from vime.doctor.quantization import check_quantization
from vime.plan.command import scheme_lines
from vime.vllm.quantized import machines

DENSE = {"model_type": "qwen3", "hidden_act": "silu", **ARCHITECTURES["qwen3-4b"].config_fields()}
EXPERTS = {"model_type": "qwen3_moe", "hidden_act": "silu", **ARCHITECTURES["qwen3-30b-a3b"].config_fields()}
ROUNDED: dict[str, Any] = copy.deepcopy(FP8_ROWS)
ROUNDED["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "float", "dynamic": True}
PLAIN = "engines compute in plain PyTorch on a CPU without AMX"
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "fp8": (EXPERTS, FP8, "warning", f"fp8 in blocks of 128 x 128: {PLAIN}"),
    "int4": (DENSE, INT4, "ok", "int4 in groups of 32: engines use vLLM's kernel for int4 on CPUs"),
    "int4 experts": (EXPERTS, INT4, "warning", f"int4 in groups of 32: {PLAIN}"),
    "rows": (DENSE, ROUNDED, "warning", f"fp8 with a scale per row: {PLAIN}"),
    "rows alone": (DENSE, FP8_ROWS, "problem", "vLLM has no products with unrounded activations in fp8 with a scale"),
    "row experts": (EXPERTS, ROUNDED, "problem", "vLLM has no experts in fp8 with a scale per row (compressed-tensors"),
}  # fmt: skip


def machine(tmp_path: Path, cpu: str = "flags : fpu sse2 avx512f", capability: str = "") -> Machine:
    (tmp_path / "proc").mkdir(exist_ok=True)
    (tmp_path / "proc/cpuinfo").write_text(f"{cpu}\n")
    row = f"0, NVIDIA H100 80GB HBM3, 81559, 0, {capability}, 0"
    return Machine(root=tmp_path, command=lambda words: Output(0 if capability else None, row))


def checkpoint(folder: Path, hf: dict[str, Any], form: dict[str, Any] | None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf | ({"quantization_config": form} if form else {})))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_the_doctor_names_the_scheme_on_a_cpu(tmp_path: Path, case: str) -> None:
    hf, form, status, text = CASES[case]
    wanted = WantedRun("cpu", tmp_path, checkpoint(tmp_path / "model", hf, form))
    (finding,) = check_quantization(machine(tmp_path), wanted)
    assert (finding.name, finding.status) == ("quantisation", status)
    assert text in finding.found
    (tiles,) = check_quantization(machine(tmp_path, cpu="flags : amx_bf16 amx_tile"), wanted)
    assert tiles.status == "ok" and "AMX, which this project has not run" in tiles.found


@pytest.mark.parametrize(
    ("form", "capability", "text"),
    [
        (FP8, "9.0", "fp8 in blocks of 128 x 128: engines multiply in fp8"),
        (FP8, "8.0", "engines dequantise fp8, because products in fp8 need compute capability 8.9"),
        (INT4, "9.0", "int4 in groups of 32: engines dequantise int4 in vLLM's products with bfloat16"),
        (FP8, "", "fp8 in blocks of 128 x 128"),
        (None, "9.0", "none: plain weights in"),
    ],
)
def test_the_doctor_names_the_scheme_on_a_gpu(
    tmp_path: Path, form: dict[str, Any] | None, capability: str, text: str
) -> None:
    wanted = WantedRun("cuda", tmp_path, checkpoint(tmp_path / "model", DENSE, form))
    (finding,) = check_quantization(machine(tmp_path, capability=capability), wanted)
    assert finding.status == "ok" and text in finding.found


def test_the_doctor_reports_a_scheme_that_no_run_can_use(tmp_path: Path) -> None:
    awq = checkpoint(tmp_path / "awq", DENSE, {"quant_method": "awq"})
    (finding,) = check_quantization(machine(tmp_path), WantedRun("cpu", tmp_path, awq))
    assert (finding.status, finding.remedy) == ("problem", "use a checkpoint in bfloat16")
    assert finding.found.endswith("got awq")
    oss = {"model_type": "gpt_oss", **ARCHITECTURES["gpt-oss-20b"].config_fields()}
    mxfp4 = checkpoint(tmp_path / "oss", oss, {"quant_method": "mxfp4"})
    (finding,) = check_quantization(machine(tmp_path), WantedRun("cpu", tmp_path, mxfp4))
    assert finding.status == "problem" and finding.found.startswith("mxfp4: ")
    other = checkpoint(tmp_path / "other", {"model_type": "mamba"}, FP8)
    (finding,) = check_quantization(machine(tmp_path), WantedRun("cpu", tmp_path, other))
    assert finding.found.endswith("got 'mamba'") and finding.remedy.startswith("docs/adding-a-model.md")
    (finding,) = check_quantization(machine(tmp_path), WantedRun("cpu", tmp_path, tmp_path / "none"))
    assert finding.status == "problem" and "must be a directory with a config.json" in finding.found
    assert check_quantization(machine(tmp_path), WantedRun("cpu", tmp_path)) == []


def run_argv(folder: Path, device: str) -> list[str]:
    (folder / "p.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    argv = f"--hf-checkpoint {folder} --prompt-data {folder}/p.jsonl --num-rollout 1 --device {device}"
    argv += " --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --num-gpus-per-node 2 --rollout-batch-size 4"
    return [*argv.split(), "--n-samples-per-prompt", "2", "--rollout-max-response-len", "8"]


def test_odd_shapes_in_int4_need_a_gpu(tmp_path: Path) -> None:
    """The bound is that of vLLM's `can_implement`."""
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16, "hidden_size": 96}
    checkpoint(tmp_path, DENSE | heads, INT4 | {"ignore": ["lm_head", "re:.*o_proj"]})
    config = parse_config(run_argv(tmp_path, "cpu"))
    with pytest.raises(
        ValueError, match="rows and columns on each rank .* got 80 x 96 in .*qkv_proj; use a check"
    ):
        backend_for(config).require_reachable(config)
    config = parse_config(run_argv(tmp_path, "cuda"))
    backend_for(config).require_reachable(config)


def test_experts_without_a_gate_need_a_gpu(tmp_path: Path) -> None:
    """vLLM raises NotImplementedError for them on CPUs."""
    fields = ARCHITECTURES["nemotron-3-nano-30b-a3b"].config_fields()
    checkpoint(tmp_path, {"model_type": "nemotron_h", **fields}, None)
    config = parse_config(run_argv(tmp_path, "cpu"))
    with pytest.raises(
        ValueError, match="have experts with a gate for engines of --device cpu, got experts wi"
    ):
        backend_for(config).require_reachable(config)
    backend_for(config).require_reachable(parse_config(run_argv(tmp_path, "cuda")))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("case", CASES)
def test_a_run_and_its_plan_name_the_same_support(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, device: str
) -> None:
    monkeypatch.setattr(machines, "read_cpu", lambda: "flags : fpu")
    hf, form, status, text = CASES[case]
    checkpoint(tmp_path, hf, form)
    config = parse_config(run_argv(tmp_path, device))
    first, support = scheme_lines(config, json.loads((tmp_path / "config.json").read_text()))
    assert first.startswith("checkpoint and engines: ")
    if device == "cuda":
        assert support == (
            "engines dequantise int4 in vLLM's products with bfloat16"
            if "int4" in case
            else "engines multiply in fp8 from compute capability 8.9 on"
        )
        backend_for(config).require_reachable(config)
    elif status == "problem":
        assert support.endswith("for CPUs without AMX, so engines would not start here")
        with pytest.raises(
            ValueError, match="--hf-checkpoint must have a scheme that engines of --device cpu"
        ) as error:
            backend_for(config).require_reachable(config)
        assert text in str(error.value)
    else:
        assert support in text
        backend_for(config).require_reachable(config)
