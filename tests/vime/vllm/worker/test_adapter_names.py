"""An adapter's matrices have the names that vLLM's slot expects, in the installed vLLM and in the oldest."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from vime.vllm.worker.adapter_loader import _matrices

MODELS = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
LAYER = "base_model.model.model.layers.0"


@pytest.mark.parametrize("module", MODELS)
@pytest.mark.parametrize("part", ["self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj"])
def test_parts_of_stacked_products_keep_their_names(module: str, part: str) -> None:
    """The mapper of a model's weights would rename q_proj, k_proj and v_proj to qkv_proj, and keep only one of the
    three."""
    family = getattr(import_module(f"vllm.model_executor.models.{module}"), MODELS[module])
    model = SimpleNamespace(hf_to_vllm_mapper=getattr(family, "hf_to_vllm_mapper", None))
    found = _matrices({f"{LAYER}.{part}.lora_A.weight": torch.zeros(1)}, model)
    assert [*found] == [f"model.layers.0.{part}"] and [*found[f"model.layers.0.{part}"]] == [True]
