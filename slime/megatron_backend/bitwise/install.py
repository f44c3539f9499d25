"""--rlk-bitwise: gives the modules of a Megatron model the operators of `rl_kernel.invariant`, as the engine has them.

Each kind of module has one line here: how it gets its operator, or that it computes nothing by itself. A module of
another kind is an error that names it. The head is `slime.megatron_backend.step.heads.bitwise`.
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
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor, nn

import rl_kernel.invariant as invariant
from slime import operators
from slime.config import Config
from slime.config.sections.kernels import BITWISE_OPERATORS
from slime.megatron_backend.model.attention import (
    PackedAttention,
    PackedLayout,
    padded_attention,
)
from slime.megatron_backend.model.gpt import HiddenGPTModel
from slime.megatron_backend.model.layers import DecoderLayer, GatedMLP, NormedLinear
from slime.megatron_backend.model.model_config import params_dtype
from slime.megatron_backend.model.norms import RMSNorm
from slime.models.rope import Rope


def adaptation(config: Config) -> Callable[[Sequence[nn.Module]], None] | None:
    """`build_model`'s `adapt` for a run with --rlk-bitwise; None without it."""
    if not config.kernels.rlk_bitwise:
        return None
    return partial(use_invariant, dtype=params_dtype(config), chosen=operators.bitwise(config))


def use_invariant(
    parts: Sequence[nn.Module], *, dtype: torch.dtype, chosen: Collection[str] = BITWISE_OPERATORS
) -> None:
    """Give each module of the model's parts its operator, if it is a chosen one. `parts`: without data-parallel
    wrappers.

    ValueError with every module that has none, or with what this machine does not compute as promised. Nothing is
    changed then.
    """
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
    operators.require_promise("trainer", next(parts[0].parameters()).device, dtype)
    for _, module in named:
        name, give = _GIVES[type(module)]
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
    """In place of the product of Megatron's column-parallel layers, as they call it."""
    if tp_group.size() == 1:
        return invariant.linear(input, weight, bias)
    return invariant.column_parallel_linear(input, weight, bias, tp_group, gather=sequence_parallel)


def _of_all_inputs(module: RowParallelLinear, input: Tensor) -> tuple[Tensor, Tensor | None]:
    """In place of the forward of Megatron's row-parallel layers, whose sum over ranks it calls by name."""
    if module.tp_group.size() == 1:
        output = invariant.linear(input, module.weight)
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
    return invariant.packed_attention(
        *(query, key, value, layout.cu_seqlens_q, layout.cu_seqlens_kv),
        *(layout.max_seqlen_q, layout.max_seqlen_kv, scale),
    )


def _angles(rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The frequencies are computed on the host, as in the engine."""
    return invariant.angles(positions, rope.frequencies().to(positions.device))


def _give_outputs(module: ColumnParallelLinear) -> None:
    module._forward_impl = _outputs


def _give_sum(module: RowParallelLinear) -> None:
    module.forward = partial(_of_all_inputs, module)


def _give_norm(module: RMSNorm) -> None:
    module.compute = invariant.rms_norm


def _give_activation(module: GatedMLP) -> None:
    module.gated = invariant.swiglu


def _give_attention(module: PackedAttention) -> None:
    module.attend = _attend


def _give_angles(module: HiddenGPTModel) -> None:
    module.angles = _angles


def _nothing(module: nn.Module) -> None: ...


_GIVES: dict[type, tuple[str | None, Callable[..., None]]] = {
    NormedLinear: ("product", _give_outputs),
    ColumnParallelLinear: ("product", _give_outputs),
    RowParallelLinear: ("product", _give_sum),
    RMSNorm: ("norm", _give_norm),
    GatedMLP: ("activation", _give_activation),
    PackedAttention: ("attention", _give_attention),
    HiddenGPTModel: ("rotary", _give_angles),
    # These pass tensors on, look rows up, or add the residual, which is rounded correctly. A row of the embedding is
    # on one rank, and the others add zeros, in whatever order.
    **dict.fromkeys(
        (
            *(LanguageModelEmbedding, VocabParallelEmbedding, TransformerBlock, DecoderLayer, SelfAttention),
            *(IdentityOp, IdentityFuncOp, nn.ModuleList, nn.Dropout),
        ),
        (None, _nothing),
    ),
}
"""The exact class of a module -> the name of its operator, and what gives it that."""


def _reason(module: nn.Module) -> str | None:
    """Why a module has no operator; "" for one of an unknown class, None for one that has."""
    if type(module) not in _GIVES:
        return ""
    if isinstance(module, RMSNorm) and module.zero_centred:
        return "centred at zero"
    if isinstance(module, RowParallelLinear) and not module.input_is_parallel:
        return "input of all ranks"
    if isinstance(module, PackedAttention):
        parts = {
            "sliding window": module.window is not None,
            "capped scores": module.cap is not None,
            "sinks": module.sinks is not None,
        }
        return next((name for name, there in parts.items() if there), None)
    if isinstance(module, HiddenGPTModel):
        described = module.described
        parts = {
            "capped logits": described.logit_cap is not None,
            "scaled embedding": described.embedding_scale != 1,
            "rotary frequencies that are not plain": any(rope.kind != "default" for rope in described.ropes),
            "interleaved rotary pairs": any(rope.interleaved for rope in described.ropes),
        }
        return next((name for name, there in parts.items() if there), None)
    return None
