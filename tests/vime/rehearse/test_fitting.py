"""Tests how a launch is made small: layout, rows with images, config.json, and the flags that the plan gets."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from slime.records.errors import FlagError
from slime.vision.images import open_image
from vime.rehearse.changes import Flags
from vime.rehearse.cluster import check_cluster
from vime.rehearse.command import _read_model
from vime.rehearse.fitting import fit_flags
from vime.rehearse.rows import make_row, take_rows
from vime.rehearse.shrink import CONTEXT, shrink_config

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)
KEYS = ["--multimodal-keys", '{"image": "images"}']


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        ({"tensor": 4, "pipeline": 1, "expert": 8}, {"tensor": 2, "pipeline": 1, "expert": 2}),
        ({"tensor": 1, "pipeline": 4, "expert": 4}, {"tensor": 1, "pipeline": 2, "expert": 1}),
        ({"tensor": 1, "pipeline": 1, "expert": 8}, {"tensor": 1, "pipeline": 1, "expert": 2}),
    ],
)
def test_experts_have_the_ranks_of_one_pipeline_stage(
    sizes: dict[str, int], kept: dict[str, int], tmp_path: Path
) -> None:
    flags = Flags.from_argv(
        [word for name, size in sizes.items() for word in (f"--{name}-model-parallel-size", str(size))]
    )
    fit_flags(flags, tmp_path / "model", tmp_path, processes=2, made_tokenizer=False)
    assert {name: flags.number(f"{name}_model_parallel_size", 0) for name in sizes} == kept
    assert flags.number("actor_num_gpus_per_node", 0) == 2


def test_flags_of_the_engine_that_decide_what_it_reads_stay(tmp_path: Path) -> None:
    words = ["--vllm-trust-remote-code", "--sglang-tool-call-parser", "qwen", "--vllm-block-size", "64"]
    flags = Flags.from_argv(words)
    fit_flags(flags, tmp_path / "model", tmp_path, processes=1, made_tokenizer=False)
    assert flags.has("vllm_trust_remote_code") and flags.value("sglang_tool_call_parser") == "qwen"
    assert not flags.has("vllm_block_size")


def test_images_of_rows_are_found_from_the_rehearsals_folder(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "one.png").write_bytes(PNG)
    rows = [{"text": "<image>?", "images": ["one.png"]}]
    (data / "rows.jsonl").write_text(json.dumps(rows[0]) + "\n")
    packed = [{"text": "<image>?", "images": [{"bytes": PNG, "path": None}]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(packed), data / "rows.parquet")
    for name in ("rows.jsonl", "rows.parquet"):
        flags = Flags.from_argv(["--prompt-data", str(data / name), *KEYS])
        take_rows(flags, tmp_path, tmp_path)
        (row,) = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
        assert open_image(row["images"][0]).size == (1, 1)


def test_made_rows_have_an_image_for_each_marker() -> None:
    row = make_row(Flags.from_argv([*KEYS, "--input-key", "text"]), 0)
    assert row["text"] == "<image>11+5="
    assert isinstance(row["images"], list) and open_image(row["images"][0]).size == (56, 56)
    assert "images" not in make_row(Flags.from_argv(["--multimodal-keys", "{"]), 0)


def test_images_without_a_processor_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    flags = Flags.from_argv(["--hf-checkpoint", str(tmp_path), *KEYS])
    with pytest.raises(
        FlagError, match="files of its processor and tokenizer here.*preprocessor_config.json"
    ):
        _read_model(flags, tmp_path, [])


def test_every_kind_of_mlp_is_in_the_tiny_model() -> None:
    kinds = ["dense"] * 3 + ["sparse"] * 5
    config = {
        "num_hidden_layers": 8,
        "mlp_layer_types": kinds,
        "first_k_dense_replace": 3,
        "window": list(range(8)),
    }
    tiny = shrink_config(config, 3, None)
    assert tiny["mlp_layer_types"] == ["dense", "sparse", "sparse"] and tiny["first_k_dense_replace"] == 1
    assert tiny["window"] == [0, 1, 2]
    few = {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]}
    assert shrink_config(few, 4, None)["mlp_layer_types"] == ["dense", "sparse", "sparse", "sparse"]


def test_sparse_attention_selects_all_tokens_of_the_context() -> None:
    config = {
        "index_topk": 2048,
        "max_position_embeddings": 131072,
        "num_hidden_layers": 8,
        "hidden_size": 6144,
    }
    tiny = shrink_config(config, 2, None)
    assert tiny["index_topk"] == tiny["max_position_embeddings"] == CONTEXT
    assert "index_topk" not in shrink_config({"num_hidden_layers": 8, "hidden_size": 6144}, 2, None)


@pytest.mark.slow
def test_a_launch_that_does_not_fit_shows_what_would_make_it_fit(tmp_path: Path) -> None:
    """vLLM's default share of a colocated GPU is too large for this card, as for the launch of run-tiny-grpo.sh."""
    (tmp_path / "model").mkdir()
    config = {
        **{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 256, "head_dim": 32},
        **{"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 262},
        **{
            "intermediate_size": 512,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e4,
            "max_position_embeddings": 1024,
        },
        **{"tie_word_embeddings": True, "hidden_act": "silu"},
    }
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input": "1+1="}\n' * 8)
    flags = Flags.from_argv(
        [
            *("--hf-checkpoint", "nowhere", "--prompt-data", "rows.jsonl", "--colocate", "--rm-type", "zero"),
            *("--actor-num-gpus-per-node", "1", "--rollout-batch-size", "64", "--n-samples-per-prompt", "16"),
            *("--global-batch-size", "256", "--num-epoch", "3", "--rollout-max-response-len", "5"),
            *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "16384"),
        ]
    )
    (found, *_) = check_cluster(flags, config, rows, tmp_path, tmp_path, {}, "h100")
    assert found.status == "problem" and "too much while engines generate" in found.found
    assert found.remedy.startswith("--vllm-gpu-memory-utilization 0.85 (now 0.92)")
