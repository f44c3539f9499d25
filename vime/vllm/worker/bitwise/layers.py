"""Defines vLLM's layers with the operators of `rl_kernel.invariant`, as classes of vLLM's registry.

vLLM builds the registered class instead of vLLM's class with that name. Weights, their names and their loading stay
vLLM's, but our operators compute the outputs. One rank holds a row of an embedding and the other ranks add zeros, so
vLLM's sum over ranks is exact in any order.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.custom_op import CustomOp, PluggableLayer, op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

import rl_kernel.invariant as invariant
from slime.models.rope import KINDS, Rope
from vime.vllm.worker.bitwise.experts import InvariantExperts, compute_logits
from vime.vllm.worker.bitwise.products import HeadMethod, LinearMethod, gather_ranks

METHODS = {UnquantizedLinearMethod: LinearMethod, UnquantizedEmbeddingMethod: HeadMethod}
"""Maps vLLM's method of a layer to our method."""


def _with_our_method(base: type[nn.Module], **methods: object) -> type[nn.Module]:
    """Returns a subclass of vLLM's layer `base` with `methods`, which uses our method of products after vLLM has built
    it.

    A quantised layer keeps its own method, and `check` reports it.
    """

    def __init__(self: Any, *args: object, **kwargs: object) -> None:
        base.__init__(self, *args, **kwargs)
        if (ours := METHODS.get(type(self.quant_method))) is not None:
            self.quant_method = ours()

    return type(f"Invariant{base.__name__}", (base,), {"__init__": __init__, **methods})


def _sum_ranks(layer: RowParallelLinear, x: Tensor) -> object:
    """Replaces the forward of vLLM's row-parallel layer. The bias is added after the sum, as in the trainer. If vLLM
    sums the ranks' outputs later, the first rank returns the sum and the other ranks return zeros."""
    if not isinstance(layer.quant_method, LinearMethod):
        return RowParallelLinear.forward(layer, x)
    weight = layer.get_parameter("weight")
    if layer.tp_size == 1:
        output = LinearMethod.multiply(x, weight)
    else:
        output = invariant.linear_over_ranks(x, weight, gather_ranks, LinearMethod.choose_product())
        if not layer.reduce_results and layer.tp_rank:
            return (torch.zeros_like(output), None) if layer.return_bias else torch.zeros_like(output)
    if layer.bias is not None and not layer.skip_bias_add:
        output = output + layer.bias
    return (output, layer.bias if layer.skip_bias_add else None) if layer.return_bias else output


class InvariantNorm(RMSNorm):
    """RMSNorm that adds the residual in the model's dtype, as the trainer does, and then normalises."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            return invariant.rms_norm(x, self.weight.data, self.variance_epsilon)
        return invariant.add_rms_norm(x, residual, self.weight.data, self.variance_epsilon)


class InvariantActivation(SiluAndMul):
    def forward(self, x: Tensor) -> Tensor:
        return invariant.swiglu(x)


class _TrainerAngles(RotaryEmbedding):
    """Rotary embedding with the trainer's angles, from the frequencies of `slime.models.rope.Rope`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Computed on the host and for all positions, whatever the device on which vLLM builds the model.
        with torch.device("cpu"):
            positions, rope = torch.arange(self.count_positions()), self.read_rope()
            cos, sin = invariant.angles(positions, rope.frequencies(), rope.amplitude)
        self.register_buffer(
            "angles", torch.stack((cos, sin)).to(torch.get_default_device()), persistent=False
        )

    angles: Tensor
    """Cos and sin, fp32 [2, positions, 1, R / 2]."""

    def count_positions(self) -> int:
        """Returns the number of positions of the table."""
        return int(self.max_position_embeddings)

    def read_rope(self) -> Rope:
        """Returns the record of the embedding."""
        return Rope(self.base, self.rotary_dim)

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        flat = positions.flatten()
        return self._rotate(query, flat), None if key is None else self._rotate(key, flat)

    def _rotate(self, x: Tensor, flat: Tensor) -> Tensor:
        heads = x.view(len(flat), -1, self.head_size)
        turned = invariant.rotate(heads[..., : self.rotary_dim], self.angles, flat)
        if self.rotary_dim == self.head_size:
            return turned.view(x.shape)
        return torch.cat((turned, heads[..., self.rotary_dim :]), -1).view(x.shape)


class InvariantRotary(_TrainerAngles):
    """Rotary embedding with plain frequencies."""


class InvariantLlama3Rotary(_TrainerAngles, Llama3RotaryEmbedding):
    """Rotary embedding with the frequencies of Llama 3.1."""

    def read_rope(self) -> Rope:
        numbers = (self.scaling_factor, self.low_freq_factor, self.high_freq_factor, self.orig_max_position)
        settings = dict(zip(KINDS["llama3"][0], numbers, strict=True))
        return Rope(self.base, self.rotary_dim, "llama3", settings)


class InvariantYarnRotary(_TrainerAngles, YaRNScalingRotaryEmbedding):
    """Rotary embedding with the frequencies of YaRN. vLLM's `max_position_embeddings` is that of the model before."""

    def count_positions(self) -> int:
        return int(self.max_position_embeddings * self.scaling_factor)

    def read_rope(self) -> Rope:
        settings = {
            "factor": self.scaling_factor,
            "original_max_position_embeddings": self.max_position_embeddings,
            **{"beta_fast": self.beta_fast, "beta_slow": self.beta_slow, "truncate": self.truncate},
        }
        return Rope(self.base, self.rotary_dim, "yarn", settings)


_PRODUCTS = (QKVParallelLinear, MergedColumnParallelLinear, RowParallelLinear)
_HEADS = (VocabParallelEmbedding, ParallelLMHead)
LAYERS: dict[str, type] = {base.__name__: _with_our_method(base) for base in (*_PRODUCTS, *_HEADS)}
LAYERS[RowParallelLinear.__name__] = _with_our_method(RowParallelLinear, forward=_sum_ranks)
_ROUTERS = (GateLinear, ReplicatedLinear)  # older vLLMs build Qwen3-MoE's router with the second class
LAYERS |= {base.__name__: _with_our_method(base, forward=compute_logits) for base in _ROUTERS}
OPERATORS: dict[str, type] = {
    "RMSNorm": InvariantNorm,
    "SiluAndMul": InvariantActivation,
    "RotaryEmbedding": InvariantRotary,
    "Llama3RotaryEmbedding": InvariantLlama3Rotary,
    "YaRNScalingRotaryEmbedding": InvariantYarnRotary,
    "UnquantizedFusedMoEMethod": InvariantExperts,
}
"""Maps vLLM's class to our class."""
_OPERATOR = {
    **{base.__name__: "product" for base in (*_PRODUCTS, *_ROUTERS)},
    "UnquantizedFusedMoEMethod": "product",
    **{base.__name__: "head" for base in _HEADS},
    **{"RMSNorm": "norm", "SiluAndMul": "activation"},
    **dict.fromkeys(("RotaryEmbedding", "Llama3RotaryEmbedding", "YaRNScalingRotaryEmbedding"), "rotary"),
}
"""Maps vLLM's class to its name in slime's BITWISE_OPERATORS."""


def register(chosen: Collection[str], fp8_scales: str | None = None) -> None:
    """Registers the classes of the chosen operators. Repeated calls are allowed."""
    LinearMethod.fp8_scales = fp8_scales
    for base, classes in ((PluggableLayer, LAYERS), (CustomOp, OPERATORS)):
        for name, ours in classes.items():
            if _OPERATOR[name] in chosen and name not in op_registry_oot:
                base.register_oot(ours, name=name)
