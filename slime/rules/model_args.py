"""Compares MODEL_ARGS with config.json. The checkpoint decides the shape, and the flags must agree with it.

Most flags have one reader here for all families. A reader for one family is in the family's record, `Family.flags`,
under the name of the flag. A flag without a counterpart in config.json is not compared, and a note names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from slime.config.fields import Values, spelled
from slime.models import FAMILIES, Decoder, Experts, read_decoder
from slime.models.decoder import Hf
from slime.records.errors import FlagError

Reader = Callable[[Hf], object]


class _Unknown:
    """Marks a value that config.json does not contain."""

    def __repr__(self) -> str:
        return "nothing"


UNKNOWN = _Unknown()


def _rotary(key: str, default: object) -> Reader:
    """Reads a rotary setting from the newer `rope_parameters` table or from the top level."""

    def read(hf: Hf) -> object:
        table = hf.get("rope_parameters") or {}
        return table.get(key, hf.get(key, default))

    return read


def _scaling(key: str, unscaled: object) -> Reader:
    """Reads a setting of rotary scaling, or returns `unscaled` if config.json has no scaling."""

    def read(hf: Hf) -> object:
        for name in ("rope_scaling", "rope_parameters"):
            if isinstance(hf.get(name), dict):
                kind = hf[name].get("rope_type", hf[name].get("type", "default"))
                return unscaled if kind == "default" else hf[name].get(key, UNKNOWN)
        return unscaled if "rope_scaling" in hf else UNKNOWN

    return read


def _scaled_by(hf: Hf) -> object:
    """Reads the kind of rotary scaling."""
    scaling = _scaling("rope_type", "default")(hf)
    return _scaling("type", "default")(hf) if scaling is UNKNOWN else scaling


def _latent(hf: Hf) -> bool:
    return hf.get("kv_lora_rank") is not None


def _from_latent(key: str) -> Reader:
    """Reads a size of latent attention. The result is None for other models."""
    return lambda hf: hf.get(key, UNKNOWN if _latent(hf) else None)


def _head(hf: Hf) -> object:
    """Reads the width of a head. Latent attention has other widths, with separate flags."""
    return UNKNOWN if _latent(hf) else hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]


def _from_decoder(read: Callable[[Decoder], object]) -> Reader:
    """Reads from the record of the model. The result is `UNKNOWN` for an unsupported model, for which another check
    raises an error."""

    def of(hf: Hf) -> object:
        try:
            return read(read_decoder(hf))
        except ValueError:
            return UNKNOWN

    return of


def _from_experts(read: Callable[[Experts], object], dense: object = None) -> Reader:
    """Reads a setting of the experts, or returns `dense` for a model without experts."""
    return _from_decoder(lambda decoder: dense if decoder.experts is None else read(decoder.experts))


def _from_family(hf: Hf) -> object:
    """Reads a flag that no family's record has: False for a known family."""
    return False if hf.get("model_type") in FAMILIES else UNKNOWN


def _predicts(hf: Hf) -> object:
    """Reads the number of layers of multi-token prediction: 0 if config.json of a known family has no such key."""
    keys = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
    return next(
        (hf[key] or 0 for key in keys if key in hf), 0 if hf.get("model_type") in FAMILIES else UNKNOWN
    )


READERS: dict[str, Reader] = {
    "num_layers": lambda hf: hf.get("num_hidden_layers"),
    "hidden_size": lambda hf: hf.get("hidden_size"),
    "ffn_hidden_size": lambda hf: hf.get("intermediate_size"),
    "num_attention_heads": lambda hf: hf.get("num_attention_heads"),
    "group_query_attention": lambda hf: hf.get("num_key_value_heads") != hf.get("num_attention_heads"),
    "num_query_groups": lambda hf: hf.get("num_key_value_heads", hf.get("num_attention_heads")),
    "kv_channels": _head,
    # in latent attention: the norms of the compressed queries, keys and values
    "qk_layernorm": lambda hf: _latent(hf) or _from_decoder(lambda decoder: bool(decoder.qk_norm))(hf),
    "swiglu": _from_decoder(lambda decoder: decoder.activation == "swiglu"),
    "quick_geglu": _from_family,
    "disable_bias_linear": _from_decoder(lambda decoder: not decoder.core.get("add_bias_linear", False)),
    "add_qkv_bias": _from_decoder(lambda decoder: decoder.qkv_bias),
    "normalization": lambda hf: "RMSNorm" if "rms_norm_eps" in hf else "LayerNorm",
    "norm_epsilon": lambda hf: hf.get("rms_norm_eps", hf.get("layer_norm_eps")),
    "position_embedding_type": lambda hf: "rope",
    "use_rotary_position_embeddings": lambda hf: True,
    "no_position_embedding": lambda hf: True,
    "rotary_base": _rotary("rope_theta", 10000.0),
    "rotary_percent": _rotary("partial_rotary_factor", 1.0),
    "vocab_size": lambda hf: hf.get("vocab_size"),
    "max_position_embeddings": lambda hf: hf.get("max_position_embeddings"),
    "untie_embeddings_and_output_weights": lambda hf: not hf.get("tie_word_embeddings", False),
    "num_experts": _from_experts(lambda experts: experts.count),
    "moe_ffn_hidden_size": _from_experts(lambda experts: experts.width),
    "moe_router_topk": _from_experts(lambda experts: experts.topk),
    "moe_layer_freq": _from_decoder(lambda decoder: [int(sparse) for sparse in decoder.sparse]),
    "moe_router_score_function": _from_experts(lambda experts: experts.score),
    # config.json has no such setting for sigmoid scores, and slime's scripts set the flag
    "moe_router_pre_softmax": _from_experts(lambda e: e.score == "sigmoid" or not e.normalised, False),
    "moe_router_enable_expert_bias": _from_experts(lambda experts: experts.bias, False),
    "moe_router_num_groups": lambda hf: hf.get("n_group"),
    "moe_router_group_topk": lambda hf: hf.get("topk_group"),
    "moe_router_topk_scaling_factor": lambda hf: hf.get("routed_scaling_factor"),
    "moe_shared_expert_intermediate_size": _from_experts(lambda experts: experts.shared or None),
    "moe_shared_expert_gate": _from_experts(lambda experts: experts.shared_gate, False),
    "spec": lambda hf: hf.get("model_type"),
    "use_gated_attention": _from_family,
    "attention_output_gate": _from_family,
    "post_self_attn_layernorm": _from_decoder(lambda decoder: decoder.post_norms),
    "post_mlp_layernorm": _from_decoder(lambda decoder: decoder.post_norms),
    "apply_layernorm_1p": _from_family,
    "rotary_interleaved": _from_decoder(lambda decoder: any(rope.interleaved for rope in decoder.ropes)),
    "use_rope_scaling": lambda hf: kind if (kind := _scaled_by(hf)) is UNKNOWN else kind == "llama3",
    "rope_scaling_factor": _scaling("factor", 1.0),
    "multi_latent_attention": _latent,
    "q_lora_rank": _from_latent("q_lora_rank"),
    "kv_lora_rank": _from_latent("kv_lora_rank"),
    "qk_head_dim": _from_latent("qk_nope_head_dim"),
    "qk_pos_emb_head_dim": _from_latent("qk_rope_head_dim"),
    "v_head_dim": _from_latent("v_head_dim"),
    "rope_type": lambda hf: "rope" if (kind := _scaled_by(hf)) == "default" else kind,
    "rotary_scaling_factor": _scaling("factor", 1.0),
    "original_max_position_embeddings": _scaling("original_max_position_embeddings", UNKNOWN),
    "beta_fast": _scaling("beta_fast", UNKNOWN),
    "beta_slow": _scaling("beta_slow", UNKNOWN),
    "mscale": _scaling("mscale", UNKNOWN),
    "mscale_all_dim": _scaling("mscale_all_dim", UNKNOWN),
    "mtp_num_layers": _predicts,
}
"""MODEL_ARG -> its value according to a Hugging Face config.json (all supported families are rotary). `Family.flags`
has the readers for single families."""

REMARKED = {
    "max_position_embeddings": "positions are rotary, so the number sizes nothing",
    "moe_shared_expert_intermediate_size": "the load compares the width with the shapes of the weights",
}
"""MODEL_ARGs whose difference is only a note if config.json has a value, with the reason."""

_ALIASES = {"use_gated_attention": "attention_output_gate"}
"""Maps slime's name of a flag to Megatron's name, which families use."""

SLIME_LAYERS = "slime_plugins.models."
_RENAMED_LAYERS = {"glm5": "glm_moe_dsa"}
"""Maps the module of slime's layers to the model_type, if the module's name is not the start of the model_type."""


def check_model_args(model_args: Values, hf_config: Hf) -> None:
    """Raises ValueError with every MODEL_ARG that differs from the checkpoint's config.json, with both values.

    Only flags that the user gave are compared.
    """
    wrong = [
        f"{spelled(name)} is {_shown(value)}, config.json has {actual}"
        for name, value, actual in _differing(model_args, hf_config)
        if actual is not UNKNOWN and not (name in REMARKED and actual)
    ]
    if wrong:
        raise FlagError(
            "MODEL_ARGS",
            "agree with config.json of --hf-checkpoint",
            "; ".join(wrong),
            "correct or leave out these flags",
        )


def model_arg_notes(model_args: Values, hf_config: Hf) -> Iterator[str]:
    """Yields a note for the MODEL_ARGS that were not compared, and one for each MODEL_ARG in `REMARKED` that
    differs."""
    unsaid = []
    for name, value, actual in _differing(model_args, hf_config):
        if actual is UNKNOWN:
            unsaid.append(f"{spelled(name)} {_shown(value)}" if value is not True else spelled(name))
        else:
            yield (
                f"{spelled(name)} {value} is not {actual} as in config.json, which decides: {REMARKED[name]}"
            )
    if unsaid:
        yield (
            f"not compared with config.json, which has no values for them: {', '.join(unsaid)}; config.json and the "
            "model family decide"
        )


def _differing(model_args: Values, hf_config: Hf) -> Iterator[tuple[str, object, object]]:
    """Yields (name, value of the flag, value of config.json) for each flag that does not agree."""
    family = FAMILIES.get(str(hf_config.get("model_type")))
    own = dict(family.flags) if family else {}
    for name, value in model_args.items():
        actual = own.get(_ALIASES.get(name, name), READERS[name])(hf_config)
        if name == "moe_layer_freq" and isinstance(value, int) and isinstance(actual, list):
            value = [int(layer % value == 0) for layer in range(len(actual))]
        if name == "spec":
            if _names_layers(value, str(actual)):
                continue
            actual = f"model_type {actual}, whose layers are built here"
        if actual is UNKNOWN or actual != value:
            yield name, value, actual


def _names_layers(spec: list[str], model_type: str) -> bool:
    """Returns True if --spec names slime's own layers of this model_type: module qwen3_5 for qwen3_5 and
    qwen3_5_moe."""
    module = spec[0] if spec else ""
    name = module.rpartition(".")[2]
    return module.startswith(SLIME_LAYERS) and model_type.startswith(_RENAMED_LAYERS.get(name, name))


def _shown(value: object) -> str:
    return (
        " ".join(value) if isinstance(value, list) and all(isinstance(x, str) for x in value) else str(value)
    )
