"""Tests the limit of engines on CPUs for models with sparse attention. tests/e2e/engines/test_engine_families.py has
their log-probs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GlmMoeDsaConfig
from vllm import ModelRegistry

from vime.vllm.cpu.sparse_attention import DenseLatentModel, register


def test_longer_sequences_than_a_query_sees_are_an_error() -> None:
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=GlmMoeDsaConfig(index_topk=64), max_model_len=65)
    )
    with pytest.raises(ValueError) as error:
        DenseLatentModel(vllm_config=config)
    assert str(error.value) == (
        "--vllm-max-model-len must be at most 64, the index_topk of config.json, on CPUs, got 65; vLLM has no sparse "
        "attention on CPUs, and dense attention differs for longer sequences"
    )


def test_the_dense_model_replaces_the_architectures() -> None:
    before = dict(ModelRegistry.models)
    try:
        register(["GlmMoeDsaForCausalLM"])
        assert ModelRegistry.models["GlmMoeDsaForCausalLM"].class_name == "DenseLatentModel"
    finally:
        ModelRegistry.models.clear()
        ModelRegistry.models.update(before)
