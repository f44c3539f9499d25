"""Gated delta net: linear attention whose state decays and forgets the earlier value of a key (Yang et al. 2412.06464).

    x -> in_proj -> causal convolution of q, k, v -> delta rule -> norm x silu(gate) -> out_proj

The state S [K, V] of a value head starts at zero with each sequence:
`S = exp(decay) * S; S = S + beta * outer(k, v - k @ S); out = q @ S`.

A packed row keeps its sequences separate in the convolution and in the state. On CUDA, both are kernels of fla-core. On
other devices, and on hosts where these kernels cannot train (slime.system.delta_nets), they are the plain PyTorch
functions of this file, and the backward computes them again. megatron-core's own module has no packed sequences.

With context parallelism, a rank has a part of the tokens, but a state runs through all tokens of a sequence. So the
ranks exchange data: each rank computes all tokens for its part of the heads (DeepSpeed Ulysses, 2309.14509).

Shapes: P rows, n tokens of this rank (P without padding), H heads of keys and A of values on this tensor-parallel rank,
K and V their sizes, B sequences of a bucket, L their padded length, T tokens of the row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import RowParallelLinear, copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm, silu, softplus

from slime.megatron_backend.context.heads import own_heads
from slime.megatron_backend.model.attention import PackedLayout
from slime.megatron_backend.model.layers import NormedLinear
from slime.megatron_backend.model.recurrent.packed_rows import (
    convolved,
    for_buckets,
    gather_rows,
    keep_inputs,
    return_rows,
    split_over_ranks,
)
from slime.models import DeltaNet
from slime.system import delta_nets

logger = logging.getLogger(__name__)

CHUNK = 64
"""Number of tokens that the plain delta rule computes with one triangular system."""
Functions = tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[..., Tensor]]


class GatedDeltaNet(MegatronModule):  # type: ignore[misc]  # megatron-core has no types
    """The attention slot of a gated delta net layer. Tensor-parallel ranks split the key heads, together with their
    value heads, and parameter rows are in the order of key heads (slime.models.hybrid.ByKeyHead).

    `A_log` is fp32 for every dtype of the model, as in vLLM.
    """

    def __init__(self, config: TransformerConfig, *, sizes: DeltaNet, **unused: Any) -> None:
        super().__init__(config)
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        self.sizes, self.heads = sizes, sizes.keys // ranks
        values, common = sizes.values // ranks, {"config": config, "bias": False, "skip_bias_add": False}
        self.in_proj = NormedLinear(
            *(config.hidden_size, sizes.keys * sum(sizes.widths)),
            **common,
            init_method=config.init_method,
            gather_output=False,
        )
        self.out_proj = RowParallelLinear(
            *(sizes.values * sizes.value_dim, config.hidden_size),
            **common,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
        )
        self.conv_weight = split_over_ranks(self.heads * sum(sizes.widths[:3]), 1, sizes.taps)
        self.dt_bias = split_over_ranks(values)
        self.A_log = split_over_ranks(values)
        self.norm_weight = nn.Parameter(torch.empty(sizes.value_dim))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GatedDeltaNet:
        """Keeps A_log in fp32 when the model is cast, because its exponential is the rate of the decay."""
        exact = self.A_log.data
        super()._apply(fn, recurse)
        self.A_log.data = exact.to(self.A_log.device)
        return self

    def forward(
        self, hidden_states: Tensor, *unused: Any, packed_seq_params: PackedLayout, **also_unused: Any
    ) -> tuple[Tensor, None]:
        """Maps [P, 1, hidden] (or this rank's part with sequence parallelism) to the same shape. Padding rows get zeros
        from the delta rule."""
        layout = packed_seq_params
        mixed = gather_rows(self.in_proj(hidden_states)[0].squeeze(1), layout)
        group, split = layout.context_group, (self.conv_weight, self.A_log, self.dt_bias)
        conv_weight, a_log, dt_bias = (x if group is None else own_heads(x, group) for x in split)
        # every rank has the whole weight, and its gradient is a sum over all heads
        weight = copy_to_tensor_model_parallel_region(self.norm_weight)
        functions = gpu_functions() if mixed.is_cuda else PLAIN
        inputs = (functions, layout, mixed, conv_weight, a_log, dt_bias, weight)
        once = functions is not PLAIN or self.config.recompute_granularity == "full"
        out = self.mix(*inputs) if once else keep_inputs(self.mix, *inputs)
        made: Tensor = self.out_proj(return_rows(out, layout).unsqueeze(1))[0]
        return made, None

    def mix(
        self,
        functions: Functions,
        layout: PackedLayout,
        mixed: Tensor,
        conv_weight: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        norm_weight: Tensor,
    ) -> Tensor:
        """Maps the projected tokens [T, H * widths] to the inputs of the last projection [T, A * V]."""
        convolve, delta_rule, norm = functions
        key, _, value, _, gates, _ = self.sizes.widths
        mixed = mixed.unflatten(-1, (-1, sum(self.sizes.widths)))
        qkv, gate, beta, decay = mixed.split([2 * key + value, value, gates, gates], dim=-1)
        qkv = convolve(qkv.flatten(1), conv_weight, layout).unflatten(-1, (-1, 2 * key + value))
        query, keys, values = qkv.split([key, key, value], dim=-1)
        out = delta_rule(
            *(query, keys, self._by_value(values)),
            -a_log.exp() * softplus(decay.flatten(1).float() + dt_bias),
            beta.flatten(1).sigmoid(),
            layout,
        )
        normed: Tensor = norm(out, self._by_value(gate), norm_weight, self.config.layernorm_epsilon)
        return normed.flatten(1)

    def _by_value(self, x: Tensor) -> Tensor:
        """Maps [T, H, value heads per key head * V] to [T, A, V]."""
        heads: Tensor = x.unflatten(-1, (-1, self.sizes.value_dim))
        return heads.flatten(1, 2)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        split = {name: getattr(self, name) for name in ("conv_weight", "dt_bias", "A_log")}
        state |= make_sharded_tensors_for_checkpoint(split, prefix, dict.fromkeys(split, 0), sharded_offsets)
        return state


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns `rms_norm(x) * weight * silu(gate)` over the last dimension, in fp32."""
    normed = rms_norm(x.float(), weight.shape, weight.float(), eps)
    return (normed * silu(gate.float())).to(x.dtype)


def padded_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, layout: PackedLayout
) -> Tensor:
    """Computes the gated delta rule within each sequence, one padded batch per bucket of the layout, in fp32.

    query and key [T, H, K], value [T, A, V], decay (logarithm) and beta [T, A] -> [T, A, V]. Queries and keys are
    normalised to length 1, and queries divided by sqrt(K). Deterministic.
    """
    share = value.shape[1] // key.shape[1]
    query, key = (_unit(x.float()).repeat_interleave(share, dim=1) for x in (query, key))
    columns = query * query.shape[-1] ** -0.5, key, value.float(), decay[..., None], beta.float()[..., None]
    return for_buckets(chunked_delta_rule, columns, layout).to(value.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def chunked_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Computes query and key [B, A, L, K], value [B, A, L, V], decay and beta [B, A, L, 1] -> [B, A, L, V].

    In a chunk, U holds each token's addition to the state. A token removes the value that its key holds, from the state
    S at the start of the chunk and from the earlier tokens. This gives a unit lower triangular system for U, whose
    right side is `beta * (v - decayed(k) @ S)`. All chunks are solved at once for both terms of that side, and only
    products with the state remain in the loop over chunks.
    """
    length = query.shape[2]
    q, k, v, g, b = (
        pad(x, (0, 0, 0, -length % CHUNK)).unflatten(2, (-1, CHUNK)) for x in (query, key, value, decay, beta)
    )
    since = g.cumsum(3)  # logarithm of the decay since the start of the chunk
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = (since - since.mT).masked_fill(later, -torch.inf).exp()
    # the solver reads only the part below the diagonal
    own, held = torch.linalg.solve_triangular(
        b * (k @ k.mT) * between, b * torch.cat([v, since.exp() * k], dim=-1), upper=False, unitriangular=True
    ).split([v.shape[-1], k.shape[-1]], dim=-1)
    last = since[..., -1:, :]
    columns = since.exp() * q, (q @ k.mT) * between, own, held, ((last - since).exp() * k).mT, last.exp()
    state = value.new_zeros(*value.shape[:2], key.shape[-1], value.shape[-1])
    outputs = []
    for read, scores, new, old, write, kept in zip(*(x.unbind(2) for x in columns), strict=True):
        added = new - old @ state
        outputs.append(read @ state + scores @ added)
        state = kept * state + write @ added
    return torch.cat(outputs, dim=2)[:, :, :length]


PLAIN = convolved, padded_delta_rule, gated_norm


@cache
def gpu_functions() -> Functions:
    """Returns `convolved`, `padded_delta_rule` and `gated_norm` for GPUs: kernels of fla-core, or the plain functions
    with a warning if the kernels cannot train here."""
    hopper = torch.cuda.get_device_capability()[0] == delta_nets.HOPPER
    why = delta_nets.local_obstacle(hopper=hopper)
    if why is None:
        return _kernels()
    logger.warning("gated delta nets train in plain PyTorch, slower: %s; %s", why, delta_nets.remedy())
    return PLAIN


def _kernels() -> Functions:
    try:
        from fla.modules.convolution import causal_conv1d
        from fla.modules.fused_norm_gate import rms_norm_gated
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as error:
        raise ValueError(
            f"the installed package {delta_nets.PACKAGE} must be importable on GPUs, got {error}; install a version "
            "for this torch, or remove the package, and the trainer uses plain PyTorch"
        ) from error

    def convolve(x: Tensor, weight: Tensor, layout: PackedLayout) -> Tensor:
        out: Tensor = causal_conv1d(
            x[None].contiguous(), weight.squeeze(1), activation="silu", cu_seqlens=layout.bounds
        )[0]
        return out[0]

    def delta_rule(*columns: Any) -> Tensor:
        *tensors, layout = columns
        query, key, value, decay, beta = (x[None].contiguous() for x in tensors)
        out: Tensor = chunk_gated_delta_rule(
            *(query, key, value, decay, beta),
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=layout.bounds,
        )[0]
        return out[0]

    def norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        out: Tensor = rms_norm_gated(x, gate.contiguous(), weight, None, activation="swish", eps=eps)
        return out

    return convolve, delta_rule, norm
