"""Implements --rlk-bitwise: sets the operators of `rl_kernel.invariant`, which the engine uses, in a Megatron model's
modules.

Each kind of module has one line here: the function that sets its operator, or the fact that it needs none. A module of
another kind raises an error that names it. The head is in `slime.megatron_backend.step.heads.bitwise`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor, nn

import rl_kernel.invariant as invariant
from rl_kernel import fp8
from slime import operators
from slime.config import Config
from slime.config.sections.kernels import BITWISE_OPERATORS
from slime.megatron_backend.bitwise.experts import (
    find_difference,
    use_activation,
    use_experts,
    use_router,
    use_sums,
)
from slime.megatron_backend.model.attention import (
    PackedAttention,
    PackedLayout,
    padded_attention,
)
from slime.megatron_backend.model.gpt import HiddenGPTModel
from slime.megatron_backend.model.layers import DecoderLayer, GatedMLP, NormedLinear, SharedExpert
from slime.megatron_backend.model.model_config import params_dtype
from slime.megatron_backend.model.moe.experts import ExpertLayer, GatedExperts, Router
from slime.megatron_backend.model.norms import RMSNorm
from slime.megatron_backend.model.products.fp8 import Fp8Forward
from slime.models.rope import Rope
from slime.rules.kernels import find_other_angles


def adaptation(config: Config) -> Callable[[Sequence[nn.Module]], None] | None:
    """Returns `build_model`'s `adapt` for a run with --rlk-bitwise, or None without the flag."""
    if not config.kernels.rlk_bitwise:
        return None
    return partial(use_invariant, dtype=params_dtype(config), chosen=operators.bitwise(config))


def use_invariant(
    parts: Sequence[nn.Module], *, dtype: torch.dtype, chosen: Collection[str] = BITWISE_OPERATORS
) -> None:
    """Sets the operators of the modules in the model's parts, if the operators are in `chosen`. `parts` have no
    data-parallel wrappers.

    Raises ValueError with every module that has no operator, or with the operators that break their guarantee on this
    machine. In these cases the model is unchanged.
    """
    device = next(parts[0].parameters()).device
    named = [(name, module) for part in parts for name, module in part.named_modules()]
    others = [
        f"{name} ({type(module).__name__}{', ' + reason if reason else ''})"
        for name, module in named
        if (reason := _reason(module)) is not None
    ]
    if others:
        raise ValueError(
            "--rlk-bitwise must have every operator of the trainer from rl_kernel.invariant, got "
            f"{', '.join(others)}; leave --rlk-bitwise out for this model"
        )
    operators.require_promise("trainer", device, dtype)
    for _, module in named:
        for name, give in _INSTALLERS[type(module)].items():
            if name in chosen:
                give(module)


def _outputs(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    tp_group: dist.ProcessGroup,
    sequence_parallel: bool,
    **unused: object,
) -> Tensor:
    """Replaces the product of Megatron's column-parallel layers, with the arguments that they pass."""
    if tp_group.size() == 1:
        return invariant.linear(input, weight, bias)
    return invariant.column_parallel_linear(input, weight, bias, tp_group, gather=sequence_parallel)


def _forward_row_parallel(module: RowParallelLinear, input: Tensor) -> tuple[Tensor, Tensor | None]:
    """Replaces the forward of Megatron's row-parallel layers, which call their sum over ranks by name."""
    if module.tp_group.size() == 1:
        output = invariant.linear(input, module.weight)
    elif isinstance(module._forward_impl, Fp8Forward):
        output = fp8.row_parallel_linear(
            *(input, module.weight, module.tp_group),
            scatter=module.sequence_parallel,
            power_of_two=module._forward_impl.power_of_two,
        )
    else:
        output = invariant.row_parallel_linear(
            input, module.weight, module.tp_group, scatter=module.sequence_parallel
        )
    if module.skip_bias_add or module.bias is None:
        return output, module.bias
    return output + module.bias, None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float, window: int | None
) -> Tensor:
    if not query.is_cuda or not layout.own:
        return padded_attention(query, key, value, layout, scale, window, inner=invariant.attention)
    return _attend_packed(query, key, value, layout, scale, window)


def _attend_packed(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float, window: int | None
) -> Tensor:
    """Computes each run of queries as a sequence whose keys end with the run. Context-parallel ranks compute parts of a
    sequence, or some of its heads, with the bits of the whole."""
    return invariant.packed_attention(
        *(query, key, value, layout.cu_seqlens_q, layout.cu_seqlens_kv),
        *(layout.max_seqlen_q, layout.max_seqlen_kv, scale, window),
    )


def _angles(rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cos and sin. The frequencies are computed on the host, as in the engine."""
    return invariant.angles(positions, rope.frequencies().to(positions.device), rope.amplitude)


def _give_outputs(module: ColumnParallelLinear) -> None:
    if not isinstance(module._forward_impl, Fp8Forward):  # whose rows are independent too
        module._forward_impl = _outputs


def _give_sum(module: RowParallelLinear) -> None:
    if not isinstance(module._forward_impl, Fp8Forward) or module.tp_group.size() > 1:
        module.forward = partial(_forward_row_parallel, module)


def _give_norm(module: RMSNorm) -> None:
    module.compute = invariant.rms_norm


def _give_activation(module: GatedMLP | SharedExpert) -> None:
    module.gated = invariant.swiglu


def _give_attention(module: PackedAttention) -> None:
    module.attend = _attend


def _give_angles(module: HiddenGPTModel) -> None:
    module.angles = _angles


_INSTALLERS: dict[type, dict[str, Callable[..., None]]] = {
    NormedLinear: {"product": _give_outputs},
    ColumnParallelLinear: {"product": _give_outputs},
    RowParallelLinear: {"product": _give_sum},
    RMSNorm: {"norm": _give_norm},
    GatedMLP: {"activation": _give_activation},
    SharedExpert: {"activation": _give_activation},
    PackedAttention: {"attention": _give_attention},
    HiddenGPTModel: {"rotary": _give_angles},
    Router: {"product": use_router},
    GatedExperts: {"product": use_experts, "activation": use_activation},
    ExpertLayer: {"product": use_sums},
    # These modules pass tensors on, look rows up, or add the residual, which is rounded correctly. A row of the
    # embedding is on one rank, and the other ranks add zeros, so the order of the sum does not matter.
    # `GatedExperts` computes with the weights of the MLPs of its experts, which are not called.
    **{
        kind: {}
        for kind in (
            *(LanguageModelEmbedding, VocabParallelEmbedding, TransformerBlock, DecoderLayer, SelfAttention),
            *(IdentityOp, IdentityFuncOp, nn.ModuleList, nn.Dropout, MLP),
        )
    },
}
"""Exact class of a module -> names of its operators, with the functions that set them."""


def _reason(module: nn.Module) -> str | None:
    """Returns why a module has no operator: "" for an unknown class, None for a module that has an operator."""
    if type(module) not in _INSTALLERS:
        return ""
    if isinstance(module, RMSNorm) and module.zero_centred:
        return "centred at zero"
    if isinstance(module, RowParallelLinear) and not module.input_is_parallel:
        return "input of all ranks"
    if isinstance(module, SharedExpert) and module.gate_weight is not None:
        return "with a gate"
    if isinstance(module, (Router, GatedExperts, ExpertLayer)):
        return find_difference(module)
    if isinstance(module, PackedAttention):
        parts = {
            "capped scores": module.cap is not None,
            "sinks": module.sinks is not None,
        }
        return next((name for name, there in parts.items() if there), None)
    if isinstance(module, HiddenGPTModel):
        described = module.described
        parts = {
            "capped logits": described.logit_cap is not None,
            "scaled embedding": described.embedding_scale != 1,
            **find_other_angles(described.ropes),
        }
        return next((name for name, there in parts.items() if there), None)
    return None
