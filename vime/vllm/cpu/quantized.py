"""Computes experts of quantised checkpoints on CPUs without AMX, in plain PyTorch.

vLLM's kernels for experts in fp8 and int4 on CPUs need AMX. These methods keep the weights as the checkpoint stores
them, and dequantise an expert for each product. They are slow, so they are for tests and small models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor
from torch.nn.functional import linear, silu
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.fused_moe.oracle.fp8 import resolve_fp8_moe_weight_block_shape
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16 as int4_moe,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped, kFp8Dynamic128Sym

from slime.models.quantized.quantization import QuantizationScheme, dequantize

Layer: TypeAlias = Any
"""A layer of experts of vLLM, whose parameters have no types."""


def take_plain_experts(vllm_config: VllmConfig) -> None:
    """Replaces vLLM's configuration of quantisation by the same configuration with plain experts, unless the machine
    has AMX."""
    former = vllm_config.quant_config
    for kind, plain in ((Fp8Config, PlainFp8Config), (CompressedTensorsConfig, PlainInt4Config)):
        if type(former) is kind and not torch.cpu._is_amx_tile_supported():
            vllm_config.quant_config = plain.__new__(plain)
            vars(vllm_config.quant_config).update(vars(former))


class PlainFp8Config(Fp8Config):
    """vLLM's configuration of fp8, with plain experts."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        skipped = is_layer_skipped(
            prefix=prefix,
            ignored_layers=self.ignored_layers,
            fused_mapping=self.packed_modules_mapping,
            match_mode=self.ignored_layers_match_mode,
        )
        if isinstance(layer, RoutedExperts) and not skipped and self.weight_block_size is not None:
            return PlainFp8Experts(self, layer)
        return super().get_quant_method(layer, prefix)


class PlainInt4Config(CompressedTensorsConfig):
    """vLLM's configuration of compressed-tensors, with plain experts."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, RoutedExperts):
            self._add_fused_moe_to_target_scheme_map()  # type: ignore[no-untyped-call]
            found = self.get_scheme_dict(layer, f"{prefix}.0.{layer.ckpt_gate_proj_name}")
            weights = None if found is None else found.get("weights")
            if isinstance(weights, QuantizationArgs) and (weights.num_bits, weights.symmetric) == (4, True):
                return PlainInt4Experts(weights, layer)
        return super().get_quant_method(layer, prefix)


class PlainFp8Experts(Fp8MoEMethod):
    """Experts in blocks of fp8. A tensor-parallel rank may have smaller blocks than the checkpoint, as in vLLM."""

    def __init__(self, quant_config: Fp8Config, layer: Layer) -> None:
        FusedMoEMethodBase.__init__(self, layer.moe_config)
        self.quant_config, self.block_quant = quant_config, True
        block = quant_config.weight_block_size
        assert block is not None, "PlainFp8Config has checked it"
        self.weight_block_size = block
        self.weight_scale_name = "weight_scale_inv"
        self.moe_block_shape, self.weight_scale_refine = resolve_fp8_moe_weight_block_shape(
            self.moe, block, kFp8Dynamic128Sym, quant_config.is_checkpoint_fp8_serialized
        )
        rows, columns = self.moe_block_shape
        self._scheme = QuantizationScheme("fp8", "float8_e4m3fn", (rows, columns), "float32")

    def process_weights_after_loading(self, layer: Layer) -> None:
        """Leaves the weights as they are stored."""

    def get_fused_moe_quant_config(self, layer: Layer) -> None:  # type: ignore[override]
        """Returns None, because `apply` calls no kernel of vLLM."""

    def apply(
        self,
        layer: Layer,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *_: object,
        **__: object,
    ) -> Tensor:
        def weight(stored: Tensor, scales: Tensor) -> Tensor:
            return dequantize({"weight": stored, "weight_scale_inv": scales}, self._scheme)

        up = layer.w13_weight, layer.w13_weight_scale_inv
        return plain_experts(
            layer, x, topk_weights, topk_ids, weight, up, (layer.w2_weight, layer.w2_weight_scale_inv)
        )


class PlainInt4Experts(int4_moe.CompressedTensorsWNA16MoEMethod):
    """Experts in groups of int4."""

    def __init__(self, weights: QuantizationArgs, layer: Layer) -> None:
        FusedMoEMethodBase.__init__(self, layer.moe_config)
        self.weight_quant, self.input_quant = weights, None
        self.symmetric, self.num_bits, self.strategy = True, weights.num_bits, weights.strategy
        self.packed_factor, self.group_size = 32 // weights.num_bits, weights.group_size
        self.is_marlin = self.is_transposed = False
        self._scheme = QuantizationScheme("compressed-tensors", "int4", (1, weights.group_size), "bfloat16")

    def process_weights_after_loading(self, layer: Layer) -> None:
        """Leaves the weights as they are stored."""

    def get_fused_moe_quant_config(self, layer: Layer) -> None:
        """Returns None, because `apply` calls no kernel of vLLM."""

    def apply(
        self,
        layer: Layer,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *_: object,
        **__: object,
    ) -> Tensor:
        def weight(packed: Tensor, scales: Tensor) -> Tensor:
            shape = torch.tensor([len(packed), packed.shape[1] * self.packed_factor])
            stored = {"weight_packed": packed, "weight_scale": scales, "weight_shape": shape}
            return dequantize(stored, self._scheme)

        up = layer.w13_weight_packed, layer.w13_weight_scale
        return plain_experts(
            layer, x, topk_weights, topk_ids, weight, up, (layer.w2_weight_packed, layer.w2_weight_scale)
        )


def plain_experts(
    layer: Layer,
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    weight: Callable[[Tensor, Tensor], Tensor],
    up: tuple[Tensor, Tensor],
    down: tuple[Tensor, Tensor],
) -> Tensor:
    """Returns the sum of `topk_weights` times the chosen experts' outputs for the tokens x [T, H], from the experts of
    this rank. `up` and `down` are the stored weights and scales of all experts. `weight` dequantises those of one
    expert, to gate above up [2 F, H] and to down [H, F]."""
    ids = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids.long()]
    total = torch.zeros(x.shape, dtype=torch.float32)
    for expert in range(layer.local_num_experts):
        tokens, columns = (ids == expert).nonzero(as_tuple=True)
        if len(tokens):
            first, second = (
                weight(codes[expert], scales[expert]).to(x.dtype) for codes, scales in (up, down)
            )
            gate, rest = linear(x[tokens], first).chunk(2, -1)
            found = linear(silu(gate) * rest, second)
            total.index_add_(0, tokens, found * topk_weights[tokens, columns, None])
    return total.to(x.dtype)
