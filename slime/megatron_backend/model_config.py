"""config.json of an HF checkpoint -> megatron-core TransformerConfig. Unsupported settings are errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch.nn.functional import silu

from slime.config import Config
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
    """Parsed config.json of a checkpoint directory, checked to be a supported model.

    ValueError if the file is absent or malformed, a needed key is missing, or the family, the rotary scaling, the
    activation or the attention kind is not supported.
    """
    hf_config = read_hf_config(checkpoint_dir)
    check_hf_config(hf_config)
    return hf_config


def check_hf_config(hf_config: dict[str, Any]) -> None:
    """ValueError for an architecture that this backend does not support."""
    check_experts(hf_config)
    family = family_for(hf_config)
    for key in _SHAPE_KEYS:
        if key not in hf_config:
            raise ValueError(f"config.json must give {key}, got none; the checkpoint is incomplete")
    supported = {"hidden_act": "silu", "use_sliding_window": False, "mlp_bias": False}
    if family.qkv_bias is False:
        supported["attention_bias"] = False
    for key, wanted in supported.items():
        value = hf_config.get(key, wanted)
        if value != wanted:
            raise ValueError(f"{key} in config.json must be {wanted}, got {value}; it is not supported")
    rope_theta(hf_config)
    rotary_size(hf_config)


def rope_theta(hf_config: dict[str, Any]) -> float:
    """Base of the rotary frequencies. config.json may have it in two places.

    ValueError for scaled rotary embeddings, which are not supported.
    """
    record = _rope_record(hf_config)
    kind = record.get("rope_type", record.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"rope_type in config.json must be default, got {kind!r}; rotary scaling is not supported"
        )
    if "rope_theta" not in record:
        raise ValueError("config.json must give rope_theta, got none; the checkpoint is incomplete")
    return float(record["rope_theta"])


def rotary_size(hf_config: dict[str, Any]) -> int:
    """Number R of rotated dimensions of a head: the first `partial_rotary_factor` of them, paired between the two
    halves of R. ValueError if R is odd, or smaller than the head in a family that rotates whole heads."""
    default, size = family_for(hf_config).rotary_fraction, head_dim(hf_config)
    fraction = _rope_record(hf_config).get("partial_rotary_factor", default)
    if default == 1.0 and fraction != 1.0:
        raise ValueError(
            f"partial_rotary_factor in config.json must be 1, got {fraction}; it is not supported"
        )
    rotated = int(size * fraction)
    if rotated % 2 or not 0 < rotated <= size:
        raise ValueError(
            "partial_rotary_factor in config.json must leave an even part of a head to rotate, got "
            f"{fraction} of head_dim {size}"
        )
    return rotated


def _rope_record(hf_config: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings. Older files have them at the top level, newer files in the record `rope_parameters`."""
    scaling, parameters = hf_config.get("rope_scaling") or {}, hf_config.get("rope_parameters") or {}
    return {**hf_config, **scaling, **parameters}


def head_dim(hf_config: dict[str, Any]) -> int:
    """Size of one attention head: `head_dim`, else hidden size divided by the number of heads."""
    size: int = hf_config.get("head_dim") or hf_config["hidden_size"] // hf_config["num_attention_heads"]
    return size


def params_dtype(config: Config) -> torch.dtype:
    """Dtype of parameters and activations, from the name in `config.params_dtype`: float32 or bfloat16."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if config.megatron.params_dtype not in dtypes:
        raise ValueError(
            f"parameters must be {' or '.join(dtypes)}, got {config.megatron.params_dtype}; use --fp32 or --bf16"
        )
    return dtypes[config.megatron.params_dtype]


def padded_vocab_size(vocab_size: int, divisible_by: int, tp_size: int) -> int:
    """Vocabulary rows with padding: `vocab_size` rounded up to a multiple of `divisible_by * tp_size`."""
    multiple = divisible_by * tp_size
    return -(-vocab_size // multiple) * multiple


def _said(switch: bool | str, hf_config: dict[str, Any]) -> bool:
    return hf_config.get(switch, False) if isinstance(switch, str) else switch


def _leave_as_is(weight: torch.Tensor) -> None: ...


def transformer_config(hf_config: dict[str, Any], config: Config) -> TransformerConfig:
    """Megatron's model description of a checkpoint, for the parallel layout and precision of `config`.

    The user's flags of TransformerConfig (recomputation and others) are applied last. There is no dropout, because two
    passes over the same weights must compute the same policy. `calculate_per_token_loss` is always on inside Megatron,
    so its DDP sums gradients over data-parallel ranks without dividing, and the loss has its own denominators.
    ValueError if the layers cannot be divided among the pipeline stages.
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
        "add_qkv_bias": _said(family.qkv_bias, hf_config),
        "qk_layernorm": _said(family.qk_norm, hf_config),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": config.megatron.tensor_model_parallel_size,
        "pipeline_model_parallel_size": config.megatron.pipeline_model_parallel_size,
        "context_parallel_size": config.megatron.context_parallel_size,
        "deallocate_pipeline_outputs": config.megatron.pipeline_model_parallel_size > 1,  # frees sent outputs
        "variable_seq_lengths": True,  # micro-batches differ in length, so pipeline stages send their shapes
        "moe_token_dispatcher_type": "alltoall",  # Megatron checks this setting for dense models too
        "sequence_parallel": config.megatron.sequence_parallel
        and config.megatron.tensor_model_parallel_size > 1,
        "transformer_impl": "local",
        # Every parameter is read from a checkpoint. Initialisation cannot be switched off completely, because it also
        # marks tensor-parallel parameters, and export and the gradient norm need these marks.
        "init_method": _leave_as_is,
        "output_layer_init_method": _leave_as_is,
        "embedding_init_method": _leave_as_is,
    }
    overrides = config.megatron.core_overrides(TransformerConfig)
    if expert_count(hf_config):
        fields |= expert_fields(hf_config, config, overrides)
    fields |= overrides | {"calculate_per_token_loss": True}
    return TransformerConfig(**fields)
