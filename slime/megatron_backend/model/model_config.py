"""Converts config.json of an HF checkpoint to megatron-core's TransformerConfig. Unsupported settings are errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch.nn.functional import silu

from slime.checkpoints.hf_config import read_hf_config
from slime.config import Config
from slime.megatron_backend.model.moe.experts import expert_fields
from slime.models import Decoder, read_decoder
from slime.models.decoder import choose_exchange
from slime.plan.stages import build_stages, micro_batch_group
from slime.rules.heads import check_attention


def load_hf_config(checkpoint_dir: str | Path) -> dict[str, Any]:
    """Returns the parsed config.json of a checkpoint directory, after checking that the model is supported.

    Raises ValueError if the file is absent or malformed, a needed key is missing, or the family, the rotary scaling,
    the activation or the attention kind is not supported.
    """
    hf_config = read_hf_config(checkpoint_dir)
    check_hf_config(hf_config)
    return hf_config


def check_hf_config(hf_config: dict[str, Any]) -> None:
    """Raises ValueError for an architecture that this backend does not support."""
    read_decoder(hf_config)


def params_dtype(config: Config) -> torch.dtype:
    """Returns the dtype of parameters and activations, from the name in `config.params_dtype`: float32 or bfloat16."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if config.megatron.params_dtype not in dtypes:
        raise ValueError(
            f"parameters must be {' or '.join(dtypes)}, got {config.megatron.params_dtype}; use --fp32 or --bf16"
        )
    return dtypes[config.megatron.params_dtype]


def padded_vocab_size(vocab_size: int, divisible_by: int, tp_size: int) -> int:
    """Returns the number of vocabulary rows with padding: `vocab_size` rounded up to a multiple of `divisible_by *
    tp_size`."""
    multiple = divisible_by * tp_size
    return -(-vocab_size // multiple) * multiple


def _leave_as_is(weight: torch.Tensor) -> None: ...


def transformer_config(
    hf_config: dict[str, Any], config: Config, *, predicts: bool = False
) -> TransformerConfig:
    """Returns Megatron's model description of a checkpoint, for the parallel layout and precision of `config`.

    With `predicts`, the model has its layers of multi-token prediction. The user's flags of TransformerConfig
    (recomputation and others) are applied last. There is no dropout, because two passes over the same weights must
    compute the same policy. `calculate_per_token_loss` is always on inside Megatron, so its DDP sums gradients over
    data-parallel ranks without dividing, and the loss has its own denominators. Raises ValueError if the layers cannot
    be divided among the pipeline stages.
    """
    decoder, dtype = read_decoder(hf_config), params_dtype(config)
    predictions = len(decoder.predictions) if predicts else 0
    check_attention(config, decoder)
    fields: dict[str, Any] = {
        "num_layers": len(decoder.layers),
        "mtp_num_layers": predictions or None,
        "hidden_size": decoder.hidden,
        "ffn_hidden_size": decoder.ffn,
        "num_attention_heads": decoder.heads,
        "num_query_groups": decoder.groups,
        "kv_channels": decoder.head_dim,
        "layernorm_epsilon": decoder.norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": decoder.gated,
        "activation_func": silu,
        "layernorm_zero_centered_gamma": decoder.zero_centred,
        "add_bias_linear": False,
        "add_qkv_bias": decoder.qkv_bias,
        # Megatron sums the gradients of such norms over tensor-parallel ranks, which have different heads
        "qk_layernorm": decoder.qk_norm == "head",
        "attention_output_gate": decoder.output_gate,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": config.megatron.tensor_model_parallel_size,
        "pipeline_model_parallel_size": config.megatron.pipeline_model_parallel_size,
        **_pipeline_fields(config, len(decoder.layers), predictions),
        **_context_fields(config, decoder),
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
        **decoder.core,
    }
    overrides = config.megatron.core_overrides(TransformerConfig)
    if decoder.experts:
        fields |= expert_fields(decoder, config, overrides)
    fields |= overrides | {"calculate_per_token_loss": True}
    return TransformerConfig(**fields)


def _context_fields(config: Config, decoder: Decoder) -> dict[str, object]:
    """Returns the fields of context parallelism."""
    flags = config.megatron
    tp, cp = flags.tensor_model_parallel_size, flags.context_parallel_size
    return {
        "context_parallel_size": cp,
        "cp_comm_type": choose_exchange(flags.cp_comm_type, decoder, tp, cp),
    }


def _pipeline_fields(config: Config, layers: int, predictions: int) -> dict[str, Any]:
    """Returns the fields of the pipeline's stages. Megatron gets the same list of layers that plan and estimate compute
    with."""
    stages = build_stages(config.megatron, layers)
    if stages.ranks == 1:
        return {}
    fields = {
        "pipeline_model_parallel_layout": stages.layout(predictions),
        "deallocate_pipeline_outputs": True,  # frees sent outputs
    }
    if stages.virtual == 1:
        return fields
    # With two ranks, the previous rank is also the next rank. In one batch, Megatron would mix up their messages.
    overlap = config.megatron.overrides.get("overlap_p2p_comm", True)
    return fields | {
        "virtual_pipeline_model_parallel_size": stages.virtual,
        "microbatch_group_size_per_vp_stage": micro_batch_group(config.megatron, layers),
        "overlap_p2p_comm": overlap,
        "batch_p2p_comm": not overlap,
    }
