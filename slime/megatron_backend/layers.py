"""Megatron's transformer layer with rl_kernel's fused operators in it, and without keeping what is cheap to make again.

What stands between two matrix products of a layer (the outputs of the norms and of the gated activation) is a function
of a tensor that is kept anyway. The product after it would keep it too; here its memory is given back after the forward
and filled again when the backward arrives: 2 H + F elements a token and layer less, for no product computed twice.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

import rl_kernel
from slime.megatron_backend.attention import PackedAttention
from slime.megatron_backend.experts import experts_spec


class RMSNorm(nn.RMSNorm):
    """`x * rsqrt(mean(x ** 2) + eps) * weight` (Zhang and Sennrich 2019).

    megatron-core's own wrapper of torch's norm refuses sequence parallelism, whose only demand on a norm is the mark
    on its weight: the gradient is then summed over the tensor-parallel ranks, each of which saw part of the tokens.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel
        self.deferred = False  # to the product that takes its output, see `defer`

    def forward(self, x: Tensor) -> Tensor:
        return x if self.deferred else self.normalise(x)

    def normalise(self, x: Tensor) -> Tensor:
        return super().forward(x)


class NormedLinear(ColumnParallelLinear):
    """Megatron's column-parallel product, of the norm that was deferred to it."""

    norm: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if self.norm is None:
            return super().forward(x, *args, **kwargs)
        product = super().forward
        return without_keeping(self.norm, x, lambda normed: product(normed, *args, **kwargs))


class GatedMLP(MLP):
    """Megatron's MLP with rl_kernel.swiglu between its products."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config, MLPSubmodules(linear_fc1=NormedLinear, linear_fc2=RowParallelLinear))

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        gate_and_up, _ = self.linear_fc1(hidden_states)
        if self.config.recompute_granularity == "full":
            return self.linear_fc2(rl_kernel.swiglu(gate_and_up))
        return without_keeping(rl_kernel.swiglu, gate_and_up, self.linear_fc2)


class SharedExpert(GatedMLP):
    """The expert of a sparse layer that every token goes to, as Megatron's layer builds and calls it."""

    def __init__(self, config: TransformerConfig, *, gate: bool, **unused: Any) -> None:
        assert not gate  # slime.megatron_backend.experts refuses it
        narrow = copy(config)
        narrow.ffn_hidden_size = config.moe_shared_expert_intermediate_size
        super().__init__(narrow)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states)[0]


class Layer(TransformerLayer):
    """Megatron's layer. With full recomputation it keeps nothing inside anyway, and stays as it is."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        # what --recompute-modules layernorm asks for; Megatron's own way needs Transformer Engine
        self.recompute_input_layernorm = self.recompute_pre_mlp_layernorm = False
        if config.recompute_granularity != "full":
            defer(self.input_layernorm, self.self_attention.linear_qkv)
            if (
                not self.is_moe_layer
            ):  # the router and every expert read that norm: no one product to hand it to
                defer(self.pre_mlp_layernorm, self.mlp.linear_fc1)

    def forward(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        """Also what a layer that is computed again in the backward goes through, with the micro-batch it had."""
        if self.is_moe_layer:
            self.mlp.router.replay(packed_seq_params.routing)
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)


def defer(norm: RMSNorm, linear: NormedLinear) -> None:
    """Let `linear` compute `norm`, whose parameters stay where they are."""
    norm.deferred, linear.norm = True, norm.normalise


def without_keeping(
    make: Callable[[Tensor], Tensor], x: Tensor, product: Callable[[Tensor], tuple[Tensor, Tensor | None]]
) -> tuple[Tensor, Tensor | None]:
    """`product(make(x))`, where autograd keeps `x` and not `make(x)`: the same bits are made again in the backward.

    `make` must not need its output for its own backward, and nobody but `product` has that output. Its memory is given
    back, and filled again when the gradient of the product's output is there, before it is used. Where the graph is
    retained it stays filled for the next backward. What else `make` keeps stays kept: the kernel of rl_kernel.swiglu
    keeps its input only, but its plain PyTorch keeps silu(gate) too, F elements a token.
    """
    made = make(x)
    output = product(made)
    if not output[0].requires_grad:
        return output
    storage = made.untyped_storage()
    # Handed over at the first use: a hook lives until the whole graph is dropped, after the last layer's backward, and
    # what it holds lives as long.
    emptied = [(x, storage, storage.size())]
    storage.resize_(0)

    def fill(_: Tensor) -> None:
        if not emptied:
            return
        source, storage, size = emptied.pop()
        with torch.no_grad():
            again = make(source)
        storage.resize_(size)
        storage.copy_(again.untyped_storage())

    output[0].register_hook(fill)
    return output


def layer_spec(core: TransformerConfig, *, sparse: bool = False) -> ModuleSpec:
    """One layer, of Megatron's local modules where they are not replaced; with experts if `sparse`."""
    spec = get_gpt_layer_local_spec(qk_layernorm=core.qk_layernorm, normalization=core.normalization)
    modules, attention = spec.submodules, spec.submodules.self_attention.submodules
    spec.module = Layer
    modules.input_layernorm = modules.pre_mlp_layernorm = RMSNorm
    attention.core_attention, attention.linear_qkv = PackedAttention, NormedLinear
    if core.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    modules.mlp = experts_spec(SharedExpert) if sparse else GatedMLP
    return spec
