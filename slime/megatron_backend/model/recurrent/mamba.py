"""Mamba-2: a state space model with a scalar decay per head (Dao and Gu, 2405.21060).

    x -> in_proj -> causal convolution of values, B, C -> scan -> norm(y * silu(gate)) -> out_proj

The state S [N, V] of a head starts at zero with each sequence:
`S = exp(step * A) * S + step * outer(B, v); y = C @ S + D * v`.

The scan computes chunks of tokens in plain PyTorch, in fp32, on every device. A packed row keeps its sequences separate
in the convolution and in the state. megatron-core's own module needs the package mamba_ssm.

With context parallelism, each rank computes all tokens for its part of the heads, as in
`slime.megatron_backend.model.recurrent.gated_delta_net`.

Shapes: P rows, T tokens of the row, G groups and A heads on this tensor-parallel rank, N size of B and C, V size of a
head, B sequences of a bucket, L their padded length.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.functional import rms_norm, silu, softplus

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
from slime.models import Mamba

CHUNK = 64
"""Number of tokens whose pairs the scan computes together."""


class MambaMixer(MegatronModule):  # type: ignore[misc]  # megatron-core has no types
    """The attention slot of a Mamba-2 layer. Tensor-parallel ranks split the groups, together with their heads, and
    parameter rows are in the order of groups (slime.models.hybrid.ByKeyHead).

    `A_log` is fp32 for every dtype of the model, as in vLLM. Time steps have no limits, as in vLLM and in the published
    code. transformers raises them to `time_step_min`.
    """

    def __init__(self, config: TransformerConfig, *, sizes: Mamba, **unused: object) -> None:
        super().__init__(config)
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        self.sizes = sizes
        groups, heads = sizes.keys // ranks, sizes.heads // ranks
        common = {"config": config, "bias": False, "skip_bias_add": False}
        self.in_proj = NormedLinear(
            *(config.hidden_size, sizes.keys * sum(sizes.widths)),
            **common,
            init_method=config.init_method,
            gather_output=False,
        )
        self.out_proj = RowParallelLinear(
            *(sizes.heads * sizes.head_dim, config.hidden_size),
            **common,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
        )
        channels = groups * sum(sizes.widths[1:4])
        self.conv_weight = split_over_ranks(channels, 1, sizes.taps)
        self.conv_bias = split_over_ranks(channels) if sizes.conv_bias else None
        self.dt_bias, self.A_log, self.D = (split_over_ranks(heads) for _ in range(3))
        self.norm_weight = split_over_ranks(heads * sizes.head_dim)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MambaMixer:
        """Keeps A_log in fp32 when the model is cast, because its exponential is the rate of the decay."""
        exact = self.A_log.data
        super()._apply(fn, recurse)
        self.A_log.data = exact.to(self.A_log.device)
        return self

    def forward(
        self, hidden_states: Tensor, *unused: object, packed_seq_params: PackedLayout, **also_unused: object
    ) -> tuple[Tensor, None]:
        """Maps [P, 1, hidden] (or this rank's part with sequence parallelism) to the same shape."""
        layout, group = packed_seq_params, packed_seq_params.context_group
        mixed = gather_rows(self.in_proj(hidden_states)[0].squeeze(1), layout)

        def own(parameter: Tensor) -> Tensor:
            return parameter if group is None else own_heads(parameter, group)

        bias = None if self.conv_bias is None else own(self.conv_bias)
        split = (own(x) for x in (self.conv_weight, self.dt_bias, self.A_log, self.D, self.norm_weight))
        inputs = (layout, mixed, bias, *split)
        once = self.config.recompute_granularity == "full"
        mix: Callable[..., Tensor] = self.mix
        out = mix(*inputs) if once else keep_inputs(mix, *inputs)
        made: Tensor = self.out_proj(return_rows(out, layout).unsqueeze(1))[0]
        return made, None

    def mix(
        self,
        layout: PackedLayout,
        mixed: Tensor,
        conv_bias: Tensor | None,
        conv_weight: Tensor,
        dt_bias: Tensor,
        a_log: Tensor,
        d: Tensor,
        norm_weight: Tensor,
    ) -> Tensor:
        """Maps the projected tokens [T, G * widths] to the inputs of the last projection [T, A * V]."""
        wide, _, state, _, share = self.sizes.widths
        gate, inputs, steps = mixed.unflatten(-1, (-1, sum(self.sizes.widths))).split(
            [wide, wide + 2 * state, share], dim=-1
        )
        inputs = convolved(inputs.flatten(1), conv_weight, layout, conv_bias)
        values, keys, queries = inputs.unflatten(-1, (-1, wide + 2 * state)).split(
            [wide, state, state], dim=-1
        )
        values = values.unflatten(-1, (share, -1)).float()  # [T, G, A / G, V]
        step = softplus(steps.float() + dt_bias.float().view(-1, share))[..., None]
        decay = -a_log.float().exp().view(-1, share, 1) * step
        out = packed_scan(queries.float(), keys.float(), values * step, decay, layout)
        out = out + d.float().view(-1, share, 1) * values
        weight = norm_weight.view(-1, wide)
        return gated_group_norm(out.flatten(2), gate, weight, self.config.layernorm_epsilon).flatten(1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[object, ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> dict[str, object]:
        state: dict[str, object] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        names = ("conv_weight", "conv_bias", "dt_bias", "A_log", "D", "norm_weight")
        split = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        state |= make_sharded_tensors_for_checkpoint(split, prefix, dict.fromkeys(split, 0), sharded_offsets)
        return state


def gated_group_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns `rms_norm(x * silu(gate)) * weight` over the last dimension, in fp32: x and gate [T, G, W], weight [G, W]
    -> [T, G, W] in the dtype of `gate`."""
    normed = rms_norm(x.float() * silu(gate.float()), x.shape[-1:], eps=eps)
    return (normed * weight.float()).to(gate.dtype)


def packed_scan(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, layout: PackedLayout) -> Tensor:
    """Computes `chunked_scan` within each sequence: query and key [T, G, N], value [T, G, S, V], decay (logarithm)
    [T, G, S, 1] -> [T, G, S, V], for S heads per group. Deterministic."""
    return for_buckets(chunked_scan, (query, key, value, decay), layout)


def chunked_scan(query: Tensor, key: Tensor, value: Tensor, decay: Tensor) -> Tensor:
    """Computes query and key [B, G, L, N], value [B, G, L, S, V], decay [B, G, L, S, 1] -> [B, G, L, S, V].

    A token reads the state at the start of its chunk, and the values of the chunk's tokens up to its own.
    """
    value, decay = value.transpose(2, 3), decay.transpose(2, 3)
    state = value.new_zeros(*value.shape[:3], key.shape[-1], value.shape[-1])
    chunks = zip(
        *(x.unsqueeze(2).split(CHUNK, dim=3) for x in (query, key)),
        *(x.split(CHUNK, dim=3) for x in (value, decay)),
        strict=True,
    )
    outputs = []
    for q, k, v, g in chunks:
        since = g.cumsum(3)  # logarithm of the decay since the start of the chunk
        later = torch.ones(q.shape[3], q.shape[3], dtype=torch.bool, device=q.device).triu(1)
        between = (since - since.mT).masked_fill(later, -torch.inf).exp()
        outputs.append(since.exp() * (q @ state) + ((q @ k.mT) * between) @ v)
        last = since[..., -1:, :]
        state = last.exp() * state + ((last - since).exp() * k).mT @ v
    return torch.cat(outputs, dim=3).transpose(2, 3)
