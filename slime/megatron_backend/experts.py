"""Layers with routed experts: what config.json says of them in Megatron's words, and their part of the layer spec.

    tokens -> router -> top-k experts of each token -> sum over them of weight x expert(token)

The router computes in fp32 whatever the model's dtype. Every token reaches its experts: none are dropped, and there is
no auxiliary loss, as reinforcement learning must train the policy that the engine sampled from.

Shapes: T tokens, H hidden, F width of an expert, C pairs of a token and one of its experts, sorted by expert.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

import rl_kernel
from slime.config.experts import check_expert_layout, check_expert_settings
from slime.config.fields import spelled
from slime.hf_config import expert_count, sparse_layers

_KEYS = ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")

_FREE = {"moe_token_dispatcher_type", "moe_router_load_balancing_type"}
"""Settings of `expert_fields` that a flag may change."""


def expert_fields(hf_config: dict[str, Any], config: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    """Fields of TransformerConfig for the experts that config.json has. `config` has the ranks' layout, `overrides`
    what the user set.

    `norm_topk_prob` chooses the weights of a token's experts: softmax over the logits of the chosen (their softmax over
    all, normalised), or the softmax over all as it is. ValueError for a key that is missing, a shape that Megatron
    cannot compute, and an override that would make it another model.
    """
    for key in _KEYS:
        if key not in hf_config:
            raise ValueError(f"config.json must give {key}, got none; the checkpoint is incomplete")
    experts, topk = expert_count(hf_config), hf_config["num_experts_per_tok"]
    normalised = hf_config["norm_topk_prob"]
    if not 1 <= topk <= experts:
        raise ValueError(
            f"num_experts_per_tok in config.json must lie in [1, {experts}], the experts, got {topk}"
        )
    if topk == 1 and normalised:
        raise ValueError(
            "norm_topk_prob in config.json must be False with num_experts_per_tok 1, got True; one expert's weight "
            "would always be 1, which megatron-core does not compute"
        )
    check_expert_layout(config, experts)
    fields = {
        "num_moe_experts": experts,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": hf_config["moe_intermediate_size"],
        "moe_layer_freq": [int(sparse) for sparse in sparse_layers(hf_config)],
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not normalised,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": config.expert_model_parallel_size,
        "expert_tensor_parallel_size": config.expert_tensor_parallel_size
        or config.tensor_model_parallel_size,
    }
    check_expert_settings(overrides)
    for name, value in overrides.items():
        if name in fields and name not in _FREE and value != fields[name]:
            raise ValueError(
                f"{spelled(name)} must be {fields[name]}, as the checkpoint has it, got {value}; leave it out"
            )
    return fields


class RouterLogits(torch.autograd.Function):
    """`x.float() @ weight.float().T` for x [T, H] and weight [E, H], keeping both in their own dtypes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.float() @ weight.float().T

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return (upstream @ weight.float()).to(x.dtype), (upstream.T @ x.float()).to(weight.dtype)


class Router(TopKRouter):
    """Megatron's router, without the two parts of it that megatron-core 0.16 cannot run here: its product names a
    function of Transformer Engine that is not defined where that is not installed, and its count for an expert bias
    that Qwen does not have is compiled at the first token."""

    def gating(self, input: Tensor) -> Tensor:
        """[..., H] -> fp32 logits [..., E]."""
        return RouterLogits.apply(input.flatten(0, -2), self.weight).unflatten(0, input.shape[:-1])

    def replay(self, routing: Any) -> None:
        """Take `slime.megatron_backend.routing_replay.Routing` of the micro-batch that comes next, or None."""
        self.router_replay = None if routing is None else routing.of_layer(self.layer_number - 1)

    def _apply_expert_bias(self, *unused: Any, **also_unused: Any) -> None: ...


class GatedExperts(SequentialMLP):
    """Megatron's experts, one after the other, with rl_kernel.swiglu between their products.

    As Megatron computes it without fusion: `fc2((swiglu(fc1(x)) * weight).to(x.dtype))`, weights in fp32.
    """

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Tokens [C, H], sorted by expert, experts' shares [E] of C, weights [C] -> [C, H]."""
        shares = tokens_per_expert.tolist()
        parts = zip(
            self.local_experts,
            permuted_local_hidden_states.split(shares),
            permuted_probs.split(shares),
            strict=True,
        )
        outputs = []
        for expert, tokens, weights in parts:
            gate_and_up, _ = expert.linear_fc1(tokens)
            gated = rl_kernel.swiglu(gate_and_up) * weights[:, None]
            outputs.append(expert.linear_fc2(gated.to(tokens.dtype))[0])
        return torch.cat(outputs), None


def experts_spec() -> ModuleSpec:
    """The MLP slot of a layer with experts: Megatron's layer and dispatcher, `Router` and `GatedExperts`."""
    products = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(experts=ModuleSpec(module=GatedExperts, submodules=products), router=Router),
    )
