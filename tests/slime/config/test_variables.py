"""Tests environment variables of launch scripts: those that a run refuses, and those without effect."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_cases import good_argv

from slime.config import Config
from slime.config.variables import check_variables, variable_notes
from slime.rules import parse_args


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return parse_args(good_argv(tmp_path))


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("OPEN_TRAINING_NVFP4_FAKE_QAT_FLAG", "true", "--use-tis"),
        ("MEGATRON_USE_KV_QAT", "1", "unset it"),
        ("SGLANG_RETURN_ORIGINAL_LOGPROB", "True", "--rollout-temperature 1"),
        ("RETURN_ORIGINAL_LOGPROB", "yes", "--rollout-temperature 1"),
        ("ENABLE_ROUTING_REPLAY", "1", "--use-rollout-routing-replay"),
    ],
)
def test_a_variable_that_would_change_training_is_an_error(config, name, value, advice):
    with pytest.raises(ValueError) as error:
        check_variables(config, {"HOME": "/", name: value})
    text = str(error.value)
    assert text.startswith(f"{name} must be unset, because ")
    assert f"got {value}; " in text
    assert advice in text
    assert "\n" not in text
    for off in ("0", "false", "", "No"):
        check_variables(config, {name: off})
        assert list(variable_notes(config, {name: off}, {"vllm"})) == []


def test_variables_of_the_trainer_processes_are_checked_too(config):
    flag = config.with_values(train_env_vars={"OPEN_TRAINING_NVFP4_FAKE_QAT_FLAG": 1})
    with pytest.raises(ValueError, match="OPEN_TRAINING_NVFP4_FAKE_QAT_FLAG must be unset"):
        check_variables(flag, {})
    flag = config.with_values(train_env_vars={"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": 1})
    with pytest.raises(ValueError, match="must be left out of --train-env-vars, got 1; give --round-weights"):
        check_variables(flag, {})
    check_variables(flag.with_values(round_weights=True), {})
    scales = config.with_values(
        train_env_vars={"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1", "NCCL_ALGO": "Ring"}
    )
    assert list(variable_notes(scales, {}, {"vllm"})) == [
        "environment variables without effect: NVTE_FP8_BLOCK_SCALING_FP32_SCALES; Transformer Engine reads them, and "
        "the trainer does not use it"
    ]


def test_variables_without_effect_are_noted_once_per_reason(config):
    environ = {
        "SGLANG_NSA_FORCE_MLA": "1",
        "SGL_ENABLE_JIT_DEEPGEMM": "1",
        "SLIME_HOST_IP": "10.0.0.1",
        "OPEN_TRAINING_INT4_GROUP_SIZE": "128",
        "INDEXER_ROPE_NEOX_STYLE": "0",
    }
    assert list(variable_notes(config, environ, {"vllm"})) == [
        "environment variables without effect: INDEXER_ROPE_NEOX_STYLE; config.json and the model family decide "
        "how an indexer rotates its heads",
        "environment variables without effect: OPEN_TRAINING_INT4_GROUP_SIZE; --round-weights takes the "
        "groups of --hf-checkpoint",
        "environment variables without effect: SGLANG_NSA_FORCE_MLA, SGL_ENABLE_JIT_DEEPGEMM; SGLang reads them, and "
        "no engine of this run is SGLang's",
        "environment variables without effect: SLIME_HOST_IP; no code here reads them",
    ]


def test_a_variable_that_a_part_of_the_run_reads_has_no_note(config):
    read = {
        "SGLANG_NSA_FORCE_MLA": "1",
        "SLIME_AGENT_SANDBOX_BACKEND": "docker",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "NCCL_ALGO": "Ring",
        "VLLM_BATCH_INVARIANT": "1",
    }
    assert list(variable_notes(config, read, {"vllm", "sglang"})) == []
    engine = config.with_values(overrides={"transformer_impl": "transformer_engine"})
    assert list(variable_notes(engine, {"NVTE_FUSED_ATTN": "0"}, {"vllm"})) == []
    assert len(list(variable_notes(config, {"NVTE_FUSED_ATTN": "0"}, {"vllm"}))) == 1
