"""Kinds of attention: the modules for the attention slot of a decoder layer.

A family names each layer's kind (`slime.models.Layer.kind`). A new kind is a function here, or in a separate file,
with a line in `KINDS`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.megatron_backend.model.attention import PackedAttention
from slime.megatron_backend.model.latent.latent_attention import latent_attention
from slime.megatron_backend.model.layers import NormedLinear
from slime.megatron_backend.model.normed_values import (
    KeyValueAttention,
    NormedValueAttention,
    query_key_product,
)
from slime.megatron_backend.model.norms import ProjectionNorm, RMSNorm
from slime.megatron_backend.model.recurrent.gated_delta_net import GatedDeltaNet
from slime.megatron_backend.model.recurrent.mamba import MambaMixer
from slime.models import Decoder, Layer


class BiasedOutput(RowParallelLinear):  # type: ignore[misc]  # megatron-core has no types
    """The projection after the attention with a bias. Megatron's setting would also add a bias to the MLP."""

    def __init__(self, *args: Any, bias: bool, **kwargs: Any) -> None:
        super().__init__(*args, bias=True, **kwargs)


class GatedAttention(SelfAttention):  # type: ignore[misc]  # megatron-core has no types
    """Megatron's attention with its output gate, which Megatron would compile at the first token."""

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return (x * gate.reshape(x.shape).float().sigmoid()).to(x.dtype)


class ProjectionNormedAttention(GatedAttention):
    """Attention with norms over all heads of queries and of keys. In a spec, newer Megatron allows norms only with
    `qk_layernorm`, and then sums their gradients over tensor-parallel ranks. Here each rank has the weights of its own
    heads."""

    def __init__(self, config: TransformerConfig, *args: object, **kwargs: object) -> None:
        super().__init__(config, *args, **kwargs)
        of_head = (config, self.hidden_size_per_attention_head, config.layernorm_epsilon)
        self.q_layernorm = ProjectionNorm(*of_head, heads=config.num_attention_heads)
        self.k_layernorm = ProjectionNorm(*of_head, heads=config.num_query_groups)


def full_attention(core: TransformerConfig, decoder: Decoder, layer: Layer) -> ModuleSpec:
    """Returns softmax attention with grouped heads over all previous tokens, or over a sliding window."""
    spec: ModuleSpec = get_gpt_layer_local_spec(normalization=core.normalization).submodules.self_attention
    modules = spec.submodules
    modules.core_attention = functools.partial(
        PackedAttention,
        rope=layer.rope,
        window=layer.window,
        scale=decoder.attention_scale,
        cap=decoder.attention_cap,
        sinks=decoder.sinks,
    )
    modules.linear_qkv = NormedLinear
    if decoder.output_gate:
        spec.module = GatedAttention
    if decoder.output_bias:
        modules.linear_proj = BiasedOutput
    if decoder.qk_norm == "projection":
        spec.module = ProjectionNormedAttention
    modules.q_layernorm = modules.k_layernorm = RMSNorm if decoder.qk_norm == "head" else None
    return spec


def gated_delta_net(core: TransformerConfig, decoder: Decoder, layer: Layer) -> ModuleSpec:
    return ModuleSpec(GatedDeltaNet, params={"sizes": decoder.delta})


def mamba(core: TransformerConfig, decoder: Decoder, layer: Layer) -> ModuleSpec:
    return ModuleSpec(MambaMixer, params={"sizes": decoder.mamba})


def no_attention(core: TransformerConfig, decoder: Decoder, layer: Layer) -> type:
    """Returns the module of a layer that has an MLP or experts only."""
    return IdentityOp  # type: ignore[no-any-return]


def normed_values(core: TransformerConfig, decoder: Decoder, layer: Layer) -> ModuleSpec:
    """Returns `full_attention` with a norm of the values."""
    spec = full_attention(core, decoder, layer)
    spec.module = NormedValueAttention
    return spec


def keys_as_values(core: TransformerConfig, decoder: Decoder, layer: Layer) -> ModuleSpec:
    """Returns attention with the heads of `Decoder.wide`, whose values are the keys before their norm."""
    assert decoder.wide is not None
    spec = full_attention(core, decoder, layer)
    spec.module, spec.params = KeyValueAttention, {**spec.params, "heads": decoder.wide}
    spec.submodules.linear_qkv = query_key_product(decoder.wide)
    return spec


KINDS: dict[str, Callable[[TransformerConfig, Decoder, Layer], ModuleSpec | type]] = {
    "full": full_attention,
    "latent": latent_attention,
    "gated_delta_net": gated_delta_net,
    "mamba": mamba,
    "none": no_attention,
    "normed_values": normed_values,
    "keys_as_values": keys_as_values,
}
"""Maps `Layer.kind` to the function that returns the module of the attention slot."""
