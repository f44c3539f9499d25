"""A layer where an MLP and routed experts read the residual stream in parallel (Gemma 4). Both have separate norms
before and after, and their outputs are added. The router normalises the residual stream itself.

Shapes: T tokens, H hidden, E experts.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from slime.megatron_backend.model.moe.experts import ExpertLayer, Router
from slime.megatron_backend.model.norms import RMSNorm, mark_whole


class ScaledRouter(Router):
    """A router whose input has a norm, and is divided by sqrt(H). After the choice of experts, a factor per expert
    multiplies its weight."""

    def __init__(self, config: TransformerConfig, *, biases: bool, **kwargs: object) -> None:
        super().__init__(config, biases=biases, **kwargs)
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.expert_scale = nn.Parameter(torch.ones(self.num_experts, dtype=self.weight.dtype))
        mark_whole(self.expert_scale, config)

    def gating(self, input: Tensor) -> Tensor:
        """Maps [..., H] to fp32 logits [..., E]."""
        return super().gating(self.norm(input) * input.shape[-1] ** -0.5)

    def forward(self, *call: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights [T, E] and the map of the chosen experts [T, E]."""
        weights, chosen = super().forward(*call)
        return weights * self.expert_scale.to(weights.dtype), chosen


class ParallelMLPLayer(ExpertLayer):
    """`shared_post(shared(shared_pre(x))) + routed_post(experts(routed_pre(x), router(x)))`. The shared expert is the
    model's MLP."""

    def __init__(self, config: TransformerConfig, *args: object, **kwargs: object) -> None:
        super().__init__(config, *args, **kwargs)
        for name in ("shared_pre", "shared_post", "routed_pre", "routed_post"):
            norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
            self.add_module(f"{name}_layernorm", norm)

    def shared_experts_compute(self, hidden_states: Tensor) -> Tensor:
        output = super().shared_experts_compute(self.shared_pre_layernorm(hidden_states))
        normed: Tensor = self.shared_post_layernorm(output)
        return normed

    def preprocess(self, hidden_states: Tensor, *routing: Tensor) -> tuple[Tensor, Tensor]:
        prepared: tuple[Tensor, Tensor] = super().preprocess(
            self.routed_pre_layernorm(hidden_states), *routing
        )
        return prepared

    def postprocess(self, output: Tensor, shared_expert_output: Tensor) -> Tensor:
        normed: Tensor = self.routed_post_layernorm(super().postprocess(output, None))
        return normed + shared_expert_output
