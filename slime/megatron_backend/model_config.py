"""config.json of an HF checkpoint -> megatron-core TransformerConfig. Refuses what would go wrong silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch.nn.functional import silu

from slime.hf_config import check_experts, expert_count, read_hf_config
from slime.megatron_backend.experts import expert_fields
from slime.megatron_backend.hf_weights import family_for

_SHAPE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "rms_norm_eps",
)


def load_hf_config(checkpoint_dir: str | Path) -> dict[str, Any]:
    """Parsed config.json of a checkpoint directory, checked to be a model that can be trained.

    ValueError when the file is absent or malformed, a needed key is missing, or the family, the rotary scaling, the
    activation or the attention kind is not supported.
    """
    hf_config = read_hf_config(checkpoint_dir)
    check_hf_config(hf_config)
    return hf_config


def check_hf_config(hf_config: dict[str, Any]) -> None:
    """Raise ValueError for an architecture this backend does not compute faithfully, or is not known to yet."""
    check_experts(hf_config)
    family = family_for(hf_config)
    for key in _SHAPE_KEYS:
        if key not in hf_config:
            raise ValueError(f"config.json must give {key}, got none; the checkpoint is incomplete")
    supported = {"hidden_act": "silu", "use_sliding_window": False, "mlp_bias": False}
    if not family.qkv_bias:
        supported["attention_bias"] = False
    for key, wanted in supported.items():
        value = hf_config.get(key, wanted)
        if value != wanted:
            raise ValueError(f"{key} in config.json must be {wanted}, got {value}; it is not supported")
    rope_theta(hf_config)


def rope_theta(hf_config: dict[str, Any]) -> float:
    """Base of the rotary frequencies, from either place config.json may keep it.

    Older files have `rope_theta` and `rope_scaling` at the top, newer ones one record `rope_parameters`. Only unscaled
    rotary embeddings over the whole head are supported; anything else is a ValueError.
    """
    record = {
        **hf_config,
        **(hf_config.get("rope_scaling") or {}),
        **(hf_config.get("rope_parameters") or {}),
    }
    kind = record.get("rope_type", record.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"rope_type in config.json must be default, got {kind!r}; rotary scaling is not supported"
        )
    fraction = record.get("partial_rotary_factor", 1.0)
    if fraction != 1.0:
        raise ValueError(
            f"partial_rotary_factor in config.json must be 1, got {fraction}; it is not supported"
        )
    if "rope_theta" not in record:
        raise ValueError("config.json must give rope_theta, got none; the checkpoint is incomplete")
    return float(record["rope_theta"])


def head_dim(hf_config: dict[str, Any]) -> int:
    """Size of one attention head: `head_dim`, else hidden size over heads."""
    return hf_config.get("head_dim") or hf_config["hidden_size"] // hf_config["num_attention_heads"]


def params_dtype(config: Any) -> torch.dtype:
    """Dtype of parameters and activations, from the name in `config.params_dtype`: float32 or bfloat16."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if config.params_dtype not in dtypes:
        raise ValueError(
            f"parameters must be {' or '.join(dtypes)}, got {config.params_dtype}; use --fp32 or --bf16"
        )
    return dtypes[config.params_dtype]


def padded_vocab_size(vocab_size: int, divisible_by: int, tp_size: int) -> int:
    """Vocabulary rows incl. padding: `vocab_size` rounded up to a multiple of `divisible_by * tp_size`."""
    multiple = divisible_by * tp_size
    return -(-vocab_size // multiple) * multiple


def _leave_as_is(weight: torch.Tensor) -> None: ...


def transformer_config(hf_config: dict[str, Any], config: Any) -> TransformerConfig:
    """Megatron's model description of a checkpoint, for the parallel layout and precision of `config`.

    Flags of TransformerConfig that the user gave (recomputation and the like) are applied last. There is no dropout:
    two passes over the same weights must be one policy. `calculate_per_token_loss` is always on inside Megatron: its
    DDP then sums gradients over data-parallel ranks without dividing, and the loss carries its own denominators.
    ValueError when the pipeline stages cannot share the layers.
    """
    family, dtype = family_for(hf_config), params_dtype(config)
    config.megatron.layers_of_stages(hf_config["num_hidden_layers"])
    fields: dict[str, Any] = {
        "num_layers": hf_config["num_hidden_layers"],
        "hidden_size": hf_config["hidden_size"],
        "ffn_hidden_size": hf_config["intermediate_size"],
        "num_attention_heads": hf_config["num_attention_heads"],
        "num_query_groups": hf_config.get("num_key_value_heads", hf_config["num_attention_heads"]),
        "kv_channels": head_dim(hf_config),
        "layernorm_epsilon": hf_config["rms_norm_eps"],
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": silu,
        "add_bias_linear": False,
        "add_qkv_bias": family.qkv_bias,
        "qk_layernorm": family.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": config.tensor_model_parallel_size,
        "pipeline_model_parallel_size": config.pipeline_model_parallel_size,
        "context_parallel_size": config.context_parallel_size,
        "deallocate_pipeline_outputs": config.pipeline_model_parallel_size > 1,  # what has been sent on
        "variable_seq_lengths": True,  # of micro-batches: pipeline stages tell each other shapes
        "moe_token_dispatcher_type": "alltoall",  # Megatron checks that this one can, of dense models too
        "sequence_parallel": config.sequence_parallel and config.tensor_model_parallel_size > 1,
        "transformer_impl": "local",
        # Every parameter is read from a checkpoint. (Switching initialisation off altogether would also leave out the
        # marks of tensor-parallel parameters, which export and the gradient norm go by.)
        "init_method": _leave_as_is,
        "output_layer_init_method": _leave_as_is,
        "embedding_init_method": _leave_as_is,
    }
    overrides = config.megatron.core_overrides(TransformerConfig)
    if expert_count(hf_config):
        fields |= expert_fields(hf_config, config, overrides)
    fields |= overrides | {"calculate_per_token_loss": True}
    return TransformerConfig(**fields)
