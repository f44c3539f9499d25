"""Megatron's transformer layer with rl_kernel's fused operators. It recomputes values that are cheap to recompute.

The outputs of the norms and of the gated activation are functions of tensors that autograd keeps anyway. The next
matrix product would keep these outputs too. Here, their memory is freed after the forward and filled again in the
backward. That saves 2 H + F elements per token and layer, and no matrix product is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn.functional import linear

from slime.megatron_backend.model.activations import Gated, geglu, relu2, swiglu
from slime.megatron_backend.model.norms import RMSNorm, mark_whole
from slime.megatron_backend.model.vision.deep import add_deep


class NormedLinear(ColumnParallelLinear):  # type: ignore[misc]  # megatron-core has no types
    """Megatron's column-parallel product. It also computes the norm that was deferred to it, and adds the output of an
    adapter: (output, input) -> output."""

    norm: Callable[[Tensor], Tensor] | None = None
    adapted: Callable[[Tensor, Tensor], Tensor] | None = None
    rounds_input = False
    """The product keeps a rounded copy of its input, and not the input."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        product = super().forward

        def adapted(x: Tensor) -> tuple[Tensor, Tensor | None]:
            output, bias = product(x, *args, **kwargs)
            return output if self.adapted is None else self.adapted(output, x), bias

        if self.norm is None:
            return adapted(x)
        if self.rounds_input and self.weight.requires_grad:
            return adapted(self.norm(x))
        return without_keeping(self.norm, x, adapted)


class GatedMLP(MLP):  # type: ignore[misc]  # megatron-core has no types
    """Megatron's MLP with the gated activation `gated` between its products."""

    gated: Gated = staticmethod(swiglu)

    def __init__(self, config: TransformerConfig, **unused: object) -> None:
        super().__init__(config, MLPSubmodules(linear_fc1=NormedLinear, linear_fc2=RowParallelLinear))

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        gate_and_up, _ = self.linear_fc1(hidden_states)
        rounds = getattr(self.linear_fc2, "rounds_input", False) and self.linear_fc2.weight.requires_grad
        if rounds or self.config.recompute_granularity == "full":
            output: tuple[Tensor, Tensor | None] = self.linear_fc2(self.gated(gate_and_up))
            return output
        return without_keeping(self.gated, gate_and_up, self.linear_fc2)


class GeluMLP(GatedMLP):
    """`GatedMLP` with GELU instead of SiLU."""

    gated = staticmethod(geglu)


class SquaredReluMLP(GatedMLP):
    """An MLP without a gate: `fc2(relu(fc1(x)) ** 2)`."""

    gated = staticmethod(relu2)


MLPS: dict[str, type[GatedMLP]] = {"swiglu": GatedMLP, "geglu": GeluMLP, "relu2": SquaredReluMLP}
"""Maps `Decoder.activation` to the MLP of a layer without experts."""


class SharedExpert(GatedMLP):
    """The shared expert of a sparse layer, with the interface that Megatron's layer needs. With `gate`, a sigmoid that
    depends on the token multiplies the output."""

    def __init__(self, config: TransformerConfig, *, gate: bool, gated: Gated, **unused: Any) -> None:
        narrow = copy(config)
        narrow.ffn_hidden_size = config.moe_shared_expert_intermediate_size
        super().__init__(narrow)
        self.gated = gated
        self.gate_weight: nn.Parameter | None = None
        if gate:
            self.gate_weight = nn.Parameter(torch.empty(1, config.hidden_size))
            mark_whole(self.gate_weight, config)

    # Megatron's layer needs only the tensor from a shared expert, and the pair from any other MLP
    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        output: Tensor = super().forward(hidden_states)[0]
        if self.gate_weight is None:
            return output
        return output * linear(hidden_states, self.gate_weight).sigmoid()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.gate_weight is not None:
            gate = {"gate_weight": self.gate_weight}
            state |= make_sharded_tensors_for_checkpoint(gate, prefix, {}, sharded_offsets)
        return state


class DecoderLayer(TransformerLayer):  # type: ignore[misc]  # megatron-core has no types
    """Megatron's layer. With full recomputation, it keeps no tensors inside and is Megatron's layer unchanged.

    `post_norms`: the outputs of attention and MLP have norms, before they are added to the residual stream. Without
    norms of their inputs (`Decoder.pre_norms`), the products read the residual stream. `scaled`: the
    frozen factor `layer_scalar` multiplies the output.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        post_norms: bool = False,
        scaled: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, *args, **kwargs)
        self.layer_scalar: Tensor | None = None
        if scaled:
            del self.layer_scalar
            self.register_buffer("layer_scalar", torch.ones(1))
        if post_norms:
            self.post_self_attn_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
            self.post_mlp_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
            own: Any = self  # Megatron's attributes have no types
            own.self_attn_bda = after(self.post_self_attn_layernorm, own.self_attn_bda)
            own.mlp_bda = after(self.post_mlp_layernorm, own.mlp_bda)
        # this class replaces --recompute-modules layernorm; Megatron's own code needs Transformer Engine
        self.recompute_input_layernorm = self.recompute_pre_mlp_layernorm = False
        if config.recompute_granularity == "full":
            return
        if isinstance(self.input_layernorm, RMSNorm):
            for name in ("linear_qkv", "linear_qk", "in_proj"):
                if isinstance(first := getattr(self.self_attention, name, None), NormedLinear):
                    defer(self.input_layernorm, first)
        # the router and every expert read that norm, so no single product can compute it
        if isinstance(self.pre_mlp_layernorm, RMSNorm) and not self.is_moe_layer:
            defer(self.pre_mlp_layernorm, self.mlp.linear_fc1)

    def forward(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        """Runs the layer. A recomputed layer calls this in the backward too, with its own micro-batch."""
        if self.is_moe_layer:
            self.mlp.prepare(packed_seq_params)
        hidden, context = super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        if self.layer_scalar is not None:
            hidden = hidden * self.layer_scalar
        return add_deep(hidden, packed_seq_params, self.layer_number - 1), context


def after(norm: RMSNorm, add: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Megatron's addition of an output to the residual stream, with `norm` applied to the output first."""

    def normed(*switches: Any) -> Callable[..., Tensor]:
        def added(output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            value, bias = output
            value = norm(value if bias is None else value + bias)
            total: Tensor = add(*switches)((value, None), residual, dropout)
            return total

        return added

    return normed


def defer(norm: RMSNorm, linear: NormedLinear) -> None:
    """Makes `linear` compute `norm`. The norm's parameters stay in the norm."""
    norm.deferred, linear.norm = True, norm.normalise


def without_keeping(
    make: Callable[[Tensor], Tensor], x: Tensor, product: Callable[[Tensor], tuple[Tensor, Tensor | None]]
) -> tuple[Tensor, Tensor | None]:
    """Computes `product(make(x))`, but autograd keeps only `x`. The backward computes `make(x)` again, with the same
    bits.

    The backward of `make` must not need the output of `make`, and only `product` may use that output. The output's
    memory is freed, and filled again when the gradient of the product's output arrives. If the graph is retained, the
    memory stays filled for the next backward. Other tensors that `make` saves stay saved: the kernel of
    rl_kernel.swiglu saves its input only, but the plain PyTorch form also saves silu(gate), F elements per token.
    """
    made = make(x)
    output = product(made)
    if not output[0].requires_grad:
        return output
    storage = made.untyped_storage()
    # The first use clears this list. A hook lives until the whole graph is dropped, after the last layer's backward,
    # and its tensors would live until then.
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
