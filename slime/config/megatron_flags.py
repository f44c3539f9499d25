"""Makes Megatron's own flags from the fields of megatron-core's configs, and defines historical names that differ.

The megatron-core wheel has no argument parser, so this file makes the flags from TransformerConfig, OptimizerConfig and
DistributedDataParallelConfig. `HISTORICAL` and `MODEL_ARGS` need no import. `core_flags` imports megatron.core (which
takes seconds), so it is called only for a flag without another owner. Fields that hold callables or other objects have
no flag.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import types
import typing
import warnings
from dataclasses import dataclass

from slime.config.fields import FlagSpec, spelled
from slime.config.ranges import COUNT, COUNT_OR_ZERO
from slime.records.errors import FlagError
from slime.system import extras


def layer_pattern(text: str) -> int | list[int]:
    """Parses Megatron's notations for the layers with experts: "2", "[0, 1, 1]" and sums such as "([0]*3+[1]*45)"."""
    bare = re.sub(r"\s", "", text)
    if bare.isdigit():
        return int(bare)
    layers: list[int] = []
    for term in bare.removeprefix("(").removesuffix(")").split("+"):
        match = re.fullmatch(r"\[([01](?:,[01])*)\](?:\*(\d+))?", term)
        if match is None:
            raise ValueError(f"unknown pattern of layers {text!r}")
        layers += [int(sparse) for sparse in match[1].split(",")] * int(match[2] or 1)
    return layers


MODEL_ARGS = {
    spec.name: spec
    for spec in (
        FlagSpec("num_layers", int, None, "transformer layers"),
        FlagSpec("hidden_size", int, None, "width of the residual stream"),
        FlagSpec("ffn_hidden_size", int, None, "width of the MLP"),
        FlagSpec("num_attention_heads", int, None, "query heads"),
        FlagSpec("group_query_attention", bool, False, "fewer key/value heads than query heads"),
        FlagSpec("num_query_groups", int, None, "key/value heads"),
        FlagSpec("kv_channels", int, None, "width of a head"),
        FlagSpec("qk_layernorm", bool, False, "normalise queries and keys"),
        FlagSpec("swiglu", bool, False, "gated SiLU in the MLP"),
        FlagSpec("disable_bias_linear", bool, False, "no bias in linear layers"),
        FlagSpec("add_qkv_bias", bool, False, "bias in the query, key and value projections"),
        FlagSpec("normalization", str, None, "kind of norm", choices=("LayerNorm", "RMSNorm")),
        FlagSpec("norm_epsilon", float, None, "epsilon of the norms"),
        FlagSpec(
            "position_embedding_type", str, None, "position embedding", choices=("rope", "learned_absolute")
        ),
        FlagSpec("use_rotary_position_embeddings", bool, False, "rotary position embedding"),
        FlagSpec("rotary_base", float, None, "base of the rotary frequencies"),
        FlagSpec("rotary_percent", float, None, "rotated fraction of a head"),
        FlagSpec("vocab_size", int, None, "tokens of the vocabulary, without padding"),
        FlagSpec("max_position_embeddings", int, None, "longest context"),
        FlagSpec("untie_embeddings_and_output_weights", bool, False, "output layer has its own weights"),
        FlagSpec("num_experts", int, None, "routed experts"),
        FlagSpec("moe_ffn_hidden_size", int, None, "width of an expert"),
        FlagSpec("moe_router_topk", int, None, "experts per token"),
        FlagSpec(
            "moe_layer_freq",
            layer_pattern,
            None,
            "layers with experts: a list such as [0]+[1]*47, or N for every Nth",
        ),
        FlagSpec("moe_router_score_function", str, None, "scores of experts", choices=("softmax", "sigmoid")),
        FlagSpec(
            "moe_router_pre_softmax", bool, False, "softmax over all experts, before the best are selected"
        ),
        FlagSpec("moe_router_enable_expert_bias", bool, False, "experts are chosen by score + bias"),
        FlagSpec("moe_router_num_groups", int, None, "groups of experts"),
        FlagSpec("moe_router_group_topk", int, None, "expert groups per token"),
        FlagSpec("moe_router_topk_scaling_factor", float, None, "sum of the weights of a token's experts"),
        FlagSpec("moe_shared_expert_intermediate_size", int, None, "width of the shared expert"),
        FlagSpec("moe_shared_expert_gate", bool, False, "a gate scales the shared expert"),
        FlagSpec("spec", str, None, "module and function of the layers", many=True),
        FlagSpec("use_gated_attention", bool, False, "a gate scales the output of attention"),
        FlagSpec("attention_output_gate", bool, False, "a gate scales the output of attention"),
        FlagSpec("post_self_attn_layernorm", bool, False, "a norm after attention"),
        FlagSpec("post_mlp_layernorm", bool, False, "a norm after the MLP"),
        FlagSpec("apply_layernorm_1p", bool, False, "norms store their weight minus 1"),
        FlagSpec("no_position_embedding", bool, False, "no learned position embedding"),
        FlagSpec("rotary_interleaved", bool, False, "rotary pairs are neighbours, not halves"),
        FlagSpec("quick_geglu", bool, False, "gated MLP with the sigmoid approximation of GELU"),
        FlagSpec("use_rope_scaling", bool, False, "scaling of the rotary frequencies"),
        FlagSpec("rope_scaling_factor", float, None, "factor of the rotary scaling"),
        FlagSpec("multi_latent_attention", bool, False, "latent attention (MLA)"),
        FlagSpec("q_lora_rank", int, None, "latent width of queries"),
        FlagSpec("kv_lora_rank", int, None, "latent width of keys and values"),
        FlagSpec("qk_head_dim", int, None, "part of a head without rotation"),
        FlagSpec("qk_pos_emb_head_dim", int, None, "rotated part of a head"),
        FlagSpec("v_head_dim", int, None, "width of a value head"),
        FlagSpec("rope_type", str, None, "kind of rotary scaling of latent attention"),
        FlagSpec("rotary_scaling_factor", float, None, "factor of YaRN's rotary scaling"),
        FlagSpec("original_max_position_embeddings", int, None, "context before rotary scaling"),
        FlagSpec("beta_fast", float, None, "YaRN's beta_fast"),
        FlagSpec("beta_slow", float, None, "YaRN's beta_slow"),
        FlagSpec("mscale", float, None, "YaRN's scale of attention"),
        FlagSpec("mscale_all_dim", float, None, "YaRN's scale of attention, over all dimensions"),
        FlagSpec("mtp_num_layers", int, None, "layers of multi-token prediction"),
    )
}
"""MODEL_ARGS of launch scripts. They describe the checkpoint and are compared with its config.json."""


@dataclass(frozen=True)
class Historical:
    """A Megatron flag whose name differs from its field."""

    field: str
    value: object = None
    """Value of the flag without arguments."""
    spec: FlagSpec | None = None

    def parse(self, values: list[str], typed: str) -> object:
        """Returns the value for the core field, from the strings after the flag."""
        if self.spec is not None:
            return self.spec.parse(values, typed)
        if values:
            raise FlagError(typed, "stand alone", f"{' '.join(values)!r}")
        return self.value


HISTORICAL = {
    "accumulate_allreduce_grads_in_fp32": Historical("grad_reduce_in_fp32", True),
    "attention_backend": Historical(
        "attention_backend",
        spec=FlagSpec(
            "attention_backend",
            str,
            "auto",
            "fused: the trainer's attention uses cuDNN on Hopper GPUs where it can, and a warning has the reason where "
            "it cannot. All other values: flash attention on GPUs in half precision, else padded attention.",
            choices=("auto", "flash", "fused", "unfused", "local"),
        ),
    ),
    "check_for_nan_in_loss_and_grad": Historical("check_for_nan_in_grad", True),
    "ddp_average_in_collective": Historical("average_in_collective", True),
    "ddp_bucket_size": Historical(
        "bucket_size", spec=FlagSpec("ddp_bucket_size", int, None, "", range=COUNT)
    ),
    "grad_reduce_in_bf16": Historical("grad_reduce_in_fp32", False),
    "no_bias_dropout_fusion": Historical("bias_dropout_fusion", False),
    "no_bias_gelu_fusion": Historical("bias_activation_fusion", False),
    "no_bias_swiglu_fusion": Historical("bias_activation_fusion", False),
    "no_check_for_nan_in_loss_and_grad": Historical("check_for_nan_in_grad", False),
    "no_gradient_accumulation_fusion": Historical("gradient_accumulation_fusion", False),
    "no_masked_softmax_fusion": Historical("masked_softmax_fusion", False),
    "no_overlap_p2p_communication": Historical("overlap_p2p_comm", False),
    "no_persist_layer_norm": Historical("persist_layer_norm", False),
    "no_rope_fusion": Historical("apply_rope_fusion", False),
    "recompute_activations": Historical("recompute_granularity", "selective"),
    "recompute_granularity": Historical(
        "recompute_granularity",
        spec=FlagSpec("recompute_granularity", str, None, "", choices=("full", "selective")),
    ),
    "recompute_num_layers": Historical(
        "recompute_num_layers", spec=FlagSpec("recompute_num_layers", int, None, "", range=COUNT)
    ),
    "transformer_impl": Historical(
        "transformer_impl",
        spec=FlagSpec("transformer_impl", str, "local", "", choices=("local", "transformer_engine")),
    ),
}
"""Megatron's flag names that differ from the names of its core fields."""

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "uint8"}

MANAGED = {
    "params_dtype": "set by --bf16, --fp16 or --fp32",
    "pipeline_dtype": "set by --bf16, --fp16 or --fp32",
    "autocast_dtype": "autocast is not used",
    "enable_autocast": "autocast is not used",
    "num_layers_in_first_pipeline_stage": "spelled --decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "spelled --decoder-last-pipeline-num-layers",
    "microbatch_group_size_per_vp_stage": "spelled --microbatch-group-size-per-virtual-pipeline-stage",
    "layernorm_epsilon": "spelled --norm-epsilon and read from the checkpoint's config.json",
    "add_bias_linear": "read from the checkpoint's config.json",
    "gated_linear_unit": "read from the checkpoint's config.json",
    "layernorm_zero_centered_gamma": "spelled --apply-layernorm-1p and follows from the model family",
    "num_moe_experts": "spelled --num-experts and read from the checkpoint's config.json",
    "bias_activation_fusion": "spelled --no-bias-swiglu-fusion",
}
"""Core fields without a flag, and the setting that replaces the flag."""


@dataclass(frozen=True)
class CoreFlag:
    """A flag made from a megatron-core field: its parser, the field, and whether the flag negates the field."""

    field: str
    spec: FlagSpec
    negated: bool = False

    def parse(self, values: list[str], typed: str) -> object:
        value = self.spec.parse(values, typed)
        return not value if self.negated else value


def core_config_classes() -> tuple[type, ...]:
    """Returns the megatron-core dataclasses whose fields are flags. Raises ValueError if megatron-core is missing."""
    try:
        with warnings.catch_warnings():
            # At import, Megatron warns about optional packages. The warnings do not help a user who mistyped a flag.
            warnings.simplefilter("ignore", UserWarning)
            from megatron.core.distributed import DistributedDataParallelConfig
            from megatron.core.optimizer import OptimizerConfig
            from megatron.core.transformer.transformer_config import TransformerConfig
    except ImportError as error:
        raise FlagError(
            "megatron-core",
            "be installed to check Megatron flags",
            error,
            f"install the extra: {extras.install()}",
        ) from error
    return TransformerConfig, OptimizerConfig, DistributedDataParallelConfig


def imported_core_flags() -> dict[str, CoreFlag]:
    """Returns flag name (with underscores) -> flag, for every settable field of megatron-core's configs, which it
    imports. `slime.config.core_table.core_flags` is faster."""
    out: dict[str, CoreFlag] = {}
    for config_class in core_config_classes():
        hints = typing.get_type_hints(config_class)
        for f in dataclasses.fields(config_class):
            if f.name.startswith("_") or f.name in MANAGED or f.name in MODEL_ARGS or f.name in HISTORICAL:
                continue
            spec = _make_field_spec(f, hints[f.name], config_class.__name__)
            if spec is None:
                continue
            for name in f.metadata.get("argparse_meta", {}).get("arg_names", [spelled(f.name)]):
                key = name.removeprefix("--").replace("-", "_")
                negated = spec.kind is bool and key.startswith(("no_", "disable_")) and key != f.name
                out.setdefault(key, CoreFlag(f.name, spec, negated))
    return out


def _make_field_spec(f: dataclasses.Field[object], hint: object, owner: str) -> FlagSpec | None:
    """Returns the flag of a field, or None if a command line cannot express its value."""
    default = None if f.default is dataclasses.MISSING else f.default
    kinds = [k for k in _alternatives(hint) if k is not type(None)]
    spec = FlagSpec(f.name, str, default, f"megatron-core {owner}.{f.name}")
    literals = [k for k in kinds if typing.get_origin(k) is typing.Literal]
    if literals:
        return dataclasses.replace(spec, choices=typing.get_args(literals[0]))
    if any(isinstance(k, type) and issubclass(k, enum.Enum) for k in kinds):
        names = next(tuple(k.__members__) for k in kinds if isinstance(k, type) and issubclass(k, enum.Enum))
        return dataclasses.replace(spec, choices=names, default=getattr(default, "name", default))
    if "torch.dtype" in str(hint):
        return dataclasses.replace(spec, kind=dtype_name, default=str(default).removeprefix("torch."))
    if len(kinds) == 1 and typing.get_args(kinds[0]) in ((str,), (int,)):
        return dataclasses.replace(spec, kind=typing.get_args(kinds[0])[0], many=True)
    if any(typing.get_origin(k) in (list, tuple) for k in kinds):
        return dataclasses.replace(spec, kind=json_or_text)
    plain = [k for k in (bool, int, float, str) if k in kinds]
    if not plain:
        return None
    return dataclasses.replace(spec, kind=plain[0], range=COUNT_OR_ZERO if plain[0] is int else None)


def _alternatives(hint: object) -> tuple[object, ...]:
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if is_union else (hint,)


def dtype_name(text: str) -> str:
    """Returns the name of a torch dtype, from Megatron's short or torch's long spelling."""
    name = DTYPES.get(text, text)
    if name not in DTYPES.values():
        raise ValueError(f"unknown dtype {text!r}")
    return name


def json_or_text(text: str) -> object:
    """Returns numbers and lists as JSON, and other texts unchanged (layer patterns, names)."""
    try:
        return json.loads(text)
    except ValueError:
        return text
