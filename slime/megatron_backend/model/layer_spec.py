"""The module per decoder layer, from the family's record."""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.megatron_backend.model.activations import ACTIVATIONS
from slime.megatron_backend.model.attention_kinds import KINDS
from slime.megatron_backend.model.layers import MLPS, DecoderLayer, SharedExpert
from slime.megatron_backend.model.moe.experts import experts_spec
from slime.megatron_backend.model.moe.parallel_mlp import ParallelMLPLayer, ScaledRouter
from slime.megatron_backend.model.norms import RMSNorm
from slime.models import Decoder, Layer


def layer_spec(core: TransformerConfig, decoder: Decoder, layer: Layer) -> ModuleSpec:
    """Returns the spec of a layer. Modules that are not replaced are Megatron's local modules."""
    spec: ModuleSpec = get_gpt_layer_local_spec(normalization=core.normalization)
    spec.module = DecoderLayer
    spec.params = {"post_norms": decoder.post_norms, "scaled": decoder.layer_scale}
    modules = spec.submodules
    modules.input_layernorm = modules.pre_mlp_layernorm = RMSNorm if decoder.pre_norms else IdentityOp
    modules.self_attention = KINDS[layer.kind](core, decoder, layer)
    if layer.sparse and decoder.experts:
        gated = ACTIVATIONS[decoder.activation]
        kinds = {"layer": ParallelMLPLayer, "router": ScaledRouter} if decoder.experts.parallel else {}
        modules.mlp = experts_spec(SharedExpert, gated, biases=decoder.experts.biases, **kinds)
        if decoder.experts.parallel:
            modules.pre_mlp_layernorm = IdentityOp  # the router reads the residual stream
    elif layer.mlp:
        modules.mlp = MLPS[decoder.activation]
    else:
        modules.mlp = modules.pre_mlp_layernorm = IdentityOp
        modules.mlp_bda = IdentityFuncOp
    if layer.kind == "none":
        modules.input_layernorm, modules.self_attn_bda = IdentityOp, IdentityFuncOp
    return spec
