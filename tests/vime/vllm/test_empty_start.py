"""Tests which engines start without the checkpoint's weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from config_cases import good_argv, write_model
from megatron_cases import tiny_checkpoint

from vime.backends import parse_config
from vime.vllm.server import VllmServer, VllmSpec
from vime.vllm.server_flags import engine_settings, starts_empty

ON_GPUS = ("--device", "cuda", "--colocate")


def test_engines_on_gpus_start_empty_unless_the_user_decides(tmp_path: Path) -> None:
    for more, expected in (((), "dummy"), (("--vllm-load-format", "auto"), "auto")):
        config = parse_config([*good_argv(tmp_path), *ON_GPUS, *more])
        assert starts_empty(config)
        spec = VllmSpec(**engine_settings(config), starts_empty=True, run_key="", log_path="")
        command = VllmServer(spec).command()
        assert command.count("--load-format") == 1
        assert command[command.index("--load-format") + 1] == expected


@pytest.mark.parametrize(
    "flags",
    [
        ("--device", "cpu"),
        (*ON_GPUS, "--lora-rank", "8"),
        (*ON_GPUS, "--vllm-quantization", "fp8"),
        (*ON_GPUS, "--vllm-speculative-config.method", "ngram"),
        (*ON_GPUS, "--vllm-hf-overrides.rope_theta", "20000"),
        (*ON_GPUS, "--debug-rollout-only"),
        (
            "--device",
            "cuda",
            "--no-colocate",
            "--weight-dir",
            "/w",
            "--rollout-external-engine-addrs",
            "127.0.0.1:9",
        ),
    ],
    ids=lambda flags: flags[-1],
)
def test_engines_load_values_that_no_update_brings(tmp_path: Path, flags: tuple[str, ...]) -> None:
    config = parse_config([*good_argv(tmp_path), *flags])
    assert not starts_empty(config)
    assert (
        "--load-format"
        not in VllmServer(VllmSpec(**engine_settings(config), run_key="", log_path="")).command()
    )


def test_engines_load_quantised_weights(tmp_path: Path) -> None:
    argv = good_argv(tmp_path)
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    model = Path(argv[argv.index("--hf-checkpoint") + 1])
    write_model(model, head_dim=128, quantization_config=blocks)
    assert not starts_empty(parse_config([*argv, *ON_GPUS]))


def test_engines_load_a_vision_tower(tmp_path: Path) -> None:
    config = parse_config([*good_argv(tmp_path), *ON_GPUS])
    shutil.rmtree(config.rollout.hf_checkpoint)
    tiny_checkpoint(Path(config.rollout.hf_checkpoint), "qwen2_5_vl")
    assert not starts_empty(config)


def test_engines_of_merged_adapters_start_empty(tmp_path: Path) -> None:
    """An update then brings all weights."""
    assert starts_empty(parse_config([*good_argv(tmp_path), *ON_GPUS, "--lora-rank", "8", "--lora-merge"]))


@pytest.mark.parametrize(
    ("flag", "value", "instead"),
    [
        ("spec-method", "ngram", "--vllm-speculative-config"),
        ("spec-model", "draft", "--vllm-speculative-config"),
        ("spec-tokens", "2", "--vllm-speculative-config"),
        ("quantization-config", '{"linear": "fp8_per_block"}', "--vllm-quantization"),
    ],
)
def test_second_spellings_of_such_settings_are_errors(
    tmp_path: Path, flag: str, value: str, instead: str
) -> None:
    """The rules of engines with drafts or quantised weights read one spelling."""
    with pytest.raises(ValueError, match=rf"--vllm-{flag} must be left out.*{instead}"):
        parse_config([*good_argv(tmp_path), *ON_GPUS, f"--vllm-{flag}", value])
