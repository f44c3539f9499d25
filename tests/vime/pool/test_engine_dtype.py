"""Tests the dtype of engines: the trainer's, except for a float32 trainer from a quantised checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from architectures import ARCHITECTURES
from quantization_cases import FP8, INT4

from vime.backends import parse_config
from vime.pool.engine_flags import common_settings, engine_dtype

MODEL = {"model_type": "qwen3", "hidden_act": "silu", **ARCHITECTURES["qwen3-4b"].config_fields()}


@pytest.mark.parametrize(
    ("scheme", "flags", "dtype", "name"),
    [
        (None, "--fp32", "float32", "float32"),
        (FP8, "--fp32", "bfloat16", "bfloat16+fp8"),
        (INT4, "--bf16", "bfloat16", "bfloat16+int4"),
        (FP8, "--bf16 --vllm-dtype half", "bfloat16", "float16+fp8"),
    ],
)
def test_dtype_and_its_name(tmp_path: Path, scheme: object, flags: str, dtype: str, name: str) -> None:
    """The name goes with the log-probs of engines, so that they are not compared bit by bit with the trainer's."""
    said = MODEL if scheme is None else MODEL | {"quantization_config": scheme}
    (tmp_path / "config.json").write_text(json.dumps(said))
    (tmp_path / "p.jsonl").write_text('{"input": "1+1=", "label": "2"}\n' * 64)
    argv = f"""--hf-checkpoint {tmp_path} --prompt-data {tmp_path}/p.jsonl --num-rollout 1 --device cuda {flags}
    --actor-num-gpus-per-node 1 --rollout-num-gpus 2 --num-gpus-per-node 3 --rollout-batch-size 32
    --n-samples-per-prompt 8 --use-dynamic-batch-size --max-tokens-per-gpu 9216 --rollout-max-response-len 64"""
    config = parse_config(argv.split())
    assert common_settings(config)["dtype"] == dtype
    assert engine_dtype(config) == name
