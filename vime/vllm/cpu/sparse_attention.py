"""Models with sparse latent attention (DeepSeek-V3.2, GLM-5) in engines on CPUs, where vLLM has no such attention.

A query sees at most `index_topk` tokens. In a sequence of at most `index_topk` tokens it sees all previous ones, as in
DeepSeek-V3. The engine therefore runs vLLM's model of DeepSeek-V3 without indexers, and takes no longer sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from vllm import ModelRegistry
from vllm.model_executor.models.deepseek_v2 import DeepseekV3ForCausalLM

from slime.records.errors import FlagError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_OF_SPARSE = ("model_type", "architectures", "indexer_types", "layer_types")
"""Fields of config.json that DeepSeek-V3 does not have, in addition to those that begin with "index_"."""


def register(architectures: list[str] | None) -> None:
    """Registers the dense model for the architectures of a checkpoint with sparse attention."""
    for architecture in architectures or ():
        ModelRegistry.register_model(architecture, f"{__name__}:{DenseLatentModel.__qualname__}")


class DenseLatentModel(DeepseekV3ForCausalLM):
    """vLLM's DeepSeek-V3 for a checkpoint with sparse attention."""

    skipped_weights = ".indexer."
    """Part of the names of weights that the model does not load (vime.vllm.worker.live_weights)."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        model = vllm_config.model_config
        topk = model.hf_config.index_topk
        if model.max_model_len > topk:
            raise FlagError(
                "--vllm-max-model-len",
                f"be at most {topk}, the index_topk of config.json, on CPUs",
                model.max_model_len,
                "vLLM has no sparse attention on CPUs, and dense attention differs for longer sequences",
            )
        fields = {
            name: value
            for name, value in model.hf_config.to_dict().items()
            if name not in _OF_SPARSE and not name.startswith("index_")
        }
        dense = vllm_config.with_hf_config(DeepseekV3Config(**fields), ["DeepseekV3ForCausalLM"])
        super().__init__(vllm_config=dense, prefix=prefix)
