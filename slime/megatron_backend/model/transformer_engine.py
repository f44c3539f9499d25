"""Transformer Engine's layers: `--transformer-impl transformer_engine`. NEVER RUN: written from the sources of
megatron-core and of Transformer Engine, because no test machine has Transformer Engine.

Names and shapes of parameters stay the same, so weight tables, export and the head stay the same too. Megatron's own
spec for Transformer Engine fuses each norm into the next product and renames both. Here, norms and products are
separate. Norms, linear layers and the attention kernel are Transformer Engine's. The rotary embedding belongs to this
package and runs before the attention, because Megatron's packed form is slow (see attention.py).

slime.config raises errors for settings other than CUDA in bfloat16, because thd attention has no other kernel, and for
context parallelism, because Transformer Engine splits a row in another way.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.extensions import transformer_engine as te
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import pad

from slime.megatron_backend.model.attention import PackedLayout, rotated
from slime.models import Decoder


def packed_attention(
    kernel: Any, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, mask: AttnMaskType
) -> Tensor:
    """Maps query [P, A, D], key and value [P, G, D] to [P, A * D], zeros in padding rows. `kernel` is the forward of
    TEDotProductAttention.

    The kernel gets the rows without padding, because `cu_seqlens` end there and a kernel's output after that end is not
    defined.
    """
    query, key = rotated(query, layout), rotated(key, layout)
    q, k, v = (x[: layout.own].contiguous() for x in (query, key, value))
    out = kernel(q, k, v, None, mask, packed_seq_params=layout).reshape(layout.own, -1)
    return pad(out, (0, 0, 0, query.shape[0] - layout.own))


@functools.cache
def attention_class() -> type:
    """Returns Transformer Engine's attention with this package's rotary embedding. It is a subclass, so that names in
    checkpoints stay the same."""

    class PackedTransformerEngineAttention(te.TEDotProductAttention):  # type: ignore[misc]  # megatron-core has no types
        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            attn_mask_type: AttnMaskType = AttnMaskType.causal,
            attention_bias: Tensor | None = None,
            packed_seq_params: PackedLayout | None = None,
            **unused: Any,
        ) -> Tensor:
            assert packed_seq_params is not None
            return packed_attention(super().forward, query, key, value, packed_seq_params, attn_mask_type)

    return PackedTransformerEngineAttention


def block_spec(
    core: TransformerConfig, described: Decoder, virtual: int | None = None
) -> TransformerBlockSubmodules:
    """Returns the layers of this pipeline stage, or of a virtual stage.

    Raises ValueError if Transformer Engine is not installed, or for a model whose parts it was not written for.
    """
    if not te.HAVE_TE:
        raise ValueError(
            "--transformer-impl must be local where the package transformer-engine cannot be imported, got "
            "transformer_engine; install transformer-engine[pytorch] for this torch, or leave the flag out"
        )
    plain = all(
        (layer.kind, layer.window, layer.rope, layer.sparse) == ("full", None, 0, False)
        for layer in described.layers
    )
    own = described.activation != "swiglu" or described.zero_centred or described.embedding_scale != 1
    own |= described.sinks or any((described.attention_scale, described.attention_cap, described.logit_cap))
    if not plain or own or described.post_norms or described.output_bias or described.qk_norm == "projection":
        raise ValueError(
            "--transformer-impl must be local for a model with sliding windows, norms after attention and MLP, or "
            "other parts than those of Qwen3, got transformer_engine; leave the flag out"
        )
    layer = get_gpt_layer_local_spec(qk_layernorm=core.qk_layernorm, normalization=core.normalization)
    modules, attention = layer.submodules, layer.submodules.self_attention.submodules
    modules.input_layernorm = modules.pre_mlp_layernorm = te.TENorm
    attention.linear_qkv, attention.linear_proj = te.TEColumnParallelLinear, te.TERowParallelLinear
    attention.core_attention = attention_class()
    if core.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = te.TENorm
    products = MLPSubmodules(linear_fc1=te.TEColumnParallelLinear, linear_fc2=te.TERowParallelLinear)
    modules.mlp = ModuleSpec(MLP, submodules=products)
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(core, virtual), layer_norm=te.TENorm
    )
