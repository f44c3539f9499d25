"""Multi-head latent attention over packed sequences (DeepSeek-V2, 2405.04434, part 2.1).

    hidden -> latent of queries -> norm -> queries of all heads
    hidden -> latent of keys and values -> norm -> keys and values of all heads
           -> one rotated key, shared by all heads

Each tensor-parallel rank has the whole matrices that compute latent vectors, and its part of the heads. megatron-core's
module needs Transformer Engine for such matrices, and rotates each sequence separately. The parameters have the names
of megatron-core.

Shapes: T tokens of the rank's sequence-parallel part, P rows of the micro-batch, A heads of the rank, K and V the sizes
of a head of keys and of values, R its rotated part.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import RowParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import pad

from slime.megatron_backend.model.attention import PackedAttention, PackedLayout, rotated
from slime.megatron_backend.model.latent.selection import LightningIndexer, SelectedAttention, Selection
from slime.megatron_backend.model.latent.whole_linear import WholeLinear
from slime.megatron_backend.model.layers import NormedLinear, defer
from slime.megatron_backend.model.norms import RMSNorm
from slime.models import Decoder, Layer
from slime.models.latent import Latent


def latent_attention(core: TransformerConfig, decoder: Decoder, layer: Layer) -> ModuleSpec:
    """Returns the module of the attention slot."""
    assert isinstance(layer.attention, Latent)
    # Megatron's layer of multi-token prediction requires the mask type; PackedAttention creates its own mask
    mask = {"attn_mask_type": AttnMaskType.causal}
    module = LatentAttention if layer.attention.index is None else SparseLatentAttention
    return ModuleSpec(module, params={"sizes": layer.attention, "rope": layer.rope, **mask})


class LatentAttention(MegatronModule):  # type: ignore[misc]  # megatron-core has no types
    """Megatron's attention slot for `slime.models.latent.Latent`. `PackedAttention` gets the keys and values for all
    heads, and handles prompt sharing and context parallelism.

    With tensor parallelism it needs sequence parallelism, because the experts of every such model need it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        sizes: Latent,
        rope: int | None,
        **unused: Any,
    ) -> None:
        super().__init__(config)
        assert config.sequence_parallel or config.tensor_model_parallel_size == 1
        self.layer_number, self.sizes, self.rope = layer_number, sizes, rope
        heads = config.num_attention_heads
        if sizes.q_rank is None:
            self.linear_q_proj = self._product(config.hidden_size, heads * sizes.key)
        else:
            self.linear_q_down_proj = WholeLinear(config, config.hidden_size, sizes.q_rank, sizes.bias)
            self.q_layernorm, self.linear_q_up_proj = self._normed(sizes.q_rank, heads * sizes.key)
        width = sizes.kv_rank + sizes.turned
        self.linear_kv_down_proj = WholeLinear(config, config.hidden_size, width, sizes.bias)
        self.kv_layernorm, self.linear_kv_up_proj = self._normed(
            sizes.kv_rank, heads * (sizes.plain + sizes.value)
        )
        self.core_attention = PackedAttention(
            config, sizes.scale, rope=None, cp_comm_type=config.cp_comm_type
        )
        self.linear_proj = RowParallelLinear(
            heads * sizes.value,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=sizes.bias,
            input_is_parallel=True,
            skip_bias_add=True,
        )

    def _product(self, inputs: int, outputs: int) -> NormedLinear:
        """Returns a product that computes the rank's heads for all tokens."""
        return NormedLinear(
            inputs,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            gather_output=False,
        )

    def _normed(self, latent: int, outputs: int) -> tuple[RMSNorm, NormedLinear]:
        """Returns the norm of a latent vector and the product after it."""
        norm = RMSNorm(self.config, latent, self.config.layernorm_epsilon)
        product = self._product(latent, outputs)
        if self.config.recompute_granularity != "full":
            defer(norm, product)
        return norm, product

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedLayout,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Maps hidden_states [T, 1, H] to output [T, 1, H], and the bias that Megatron adds or None."""
        sizes, layout = self.sizes, packed_seq_params
        query = self._queries(hidden_states).squeeze(1).unflatten(-1, (-1, sizes.key))
        key, value = self._keys_and_values(hidden_states, layout)
        plain, turned = query.split([sizes.plain, sizes.turned], dim=-1)
        query = torch.cat((plain, rotated(turned, layout, self.rope)), dim=-1)
        out = self._attend(query, key, value, layout)
        output: tuple[Tensor, Tensor | None] = self.linear_proj(out.unsqueeze(1))
        return output

    def _queries(self, hidden: Tensor) -> Tensor:
        """Returns the queries [P, 1, A * K]."""
        if self.sizes.q_rank is None:
            whole: Tensor = self.linear_q_proj(hidden)[0]
            return whole
        made: Tensor = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden)))[0]
        return made

    def _keys_and_values(self, hidden: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
        """Returns the keys [P, A, K], with the rotated part last as in the queries, and the values [P, A, V]."""
        sizes = self.sizes
        latent, turned = self.linear_kv_down_proj(hidden).split([sizes.kv_rank, sizes.turned], dim=-1)
        made = self.linear_kv_up_proj(self.kv_layernorm(latent.contiguous()))[0]
        if self.config.sequence_parallel:
            # the heads of all ranks read this key, so the backward sums their gradients
            turned = gather_from_sequence_parallel_region(turned)
        turned = rotated(turned, layout, self.rope)
        made = made.squeeze(1).unflatten(-1, (-1, sizes.plain + sizes.value))
        plain, value = made.split([sizes.plain, sizes.value], dim=-1)
        return torch.cat((plain, turned.expand(-1, plain.shape[1], -1)), dim=-1), value

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout) -> Tensor:
        """Returns the output [P, A * V]. The kernels for packed sequences need heads of equal size, so the smaller
        heads are padded with zeros."""
        width = max(self.sizes.key, self.sizes.value)
        query, key, value = (_widened(x, width) for x in (query, key, value))
        out: Tensor = self.core_attention(query, key, value, None, packed_seq_params=layout)
        values: Tensor = out.unflatten(-1, (-1, width))[..., : self.sizes.value]
        return values.flatten(1)


class SparseLatentAttention(LatentAttention):
    """Latent attention of each query to the tokens that an indexer selected, its own or that of an earlier layer. If no
    sequence of the micro-batch has more tokens than a query sees, the indexer does not run."""

    core_attention: SelectedAttention

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        sizes: Latent,
        rope: int | None,
        **unused: object,
    ) -> None:
        super().__init__(config, layer_number, sizes=sizes, rope=rope)
        assert sizes.index is not None and sizes.q_rank is not None
        self.index = sizes.index
        self.core_attention = SelectedAttention(config, sizes.scale, rope=None)
        self.indexer = None if sizes.index.shared else LightningIndexer(config, sizes.q_rank, sizes.index)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedLayout,
        **unused: object,
    ) -> tuple[Tensor, Tensor | None]:
        self.core_attention.selection = self._select(hidden_states, packed_seq_params)
        output = super().forward(hidden_states, attention_mask, packed_seq_params=packed_seq_params)
        self.core_attention.selection = None
        return output

    @torch.no_grad()
    def _select(self, hidden: Tensor, layout: PackedLayout) -> Selection | None:
        if layout.max_seqlen_kv <= self.index.topk:
            return None
        source = self.index.source
        if self.indexer is None:
            assert source is not None
            return layout.selections[source]
        latent = self.q_layernorm.normalise(self.linear_q_down_proj(hidden))
        selection: Selection = self.indexer(hidden, latent, layout)
        if source is not None:
            layout.selections[source] = selection
        return selection


def _widened(x: Tensor, width: int) -> Tensor:
    """Maps [P, A, size] to [P, A, width] with zeros at each head's end."""
    return pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
