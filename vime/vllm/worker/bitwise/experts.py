"""Defines vLLM's layers of experts with the operators of `rl_kernel.invariant.experts`.

vLLM passes the router's logits to the method of the experts, which chooses the experts and computes their sum. Weights,
their names and their loading stay vLLM's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import ReplicatedLinear

import rl_kernel.invariant as invariant
from vime.vllm.worker.bitwise.products import LinearMethod, gather_ranks


class InvariantExperts(UnquantizedFusedMoEMethod):
    """Method of a layer of experts. The weights stay plain: [E, 2 F, H], gate above up, and [E, H, F]."""

    keeps_plain = True
    """Read by `live_experts.keeps_plain_experts`."""

    @property
    def supports_eplb(self) -> bool:
        """Returns False, because vLLM's router would map experts to their copies, and this method needs no router."""
        return False

    @property
    def is_monolithic(self) -> bool:
        """Returns True, because the method gets the router's logits."""
        return True

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        pass

    def apply_monolithic(
        self, layer: RoutedExperts, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None
    ) -> Tensor:
        """Maps x [T, H] and logits [T, E] to the sum of the experts' outputs [T, H]."""
        ids, weights = invariant.route(
            router_logits,
            layer.top_k,
            normalised=layer.renormalize,
            sigmoid=layer.scoring_func == "sigmoid",
            bias=layer.e_score_correction_bias,
            scale=layer.routed_scaling_factor,
        )
        local = ids if layer.expert_map is None else layer.expert_map[ids].long()
        first, second = (layer.get_parameter(name) for name in ("w13_weight", "w2_weight"))
        outputs, rows = invariant.expert_outputs(
            x, local, weights, first, second, LinearMethod.choose_product()
        )
        if get_tensor_model_parallel_world_size() == 1:
            return invariant.sum_rows(outputs, rows, x.dtype)
        slots = invariant.fill_slots(outputs, rows)
        parts = gather_ranks(slots.flatten(0, 1)).unflatten(1, slots.shape[:2])
        total = invariant.sum_slots(parts, x.dtype)
        # vLLM sums the results of the ranks
        return total if get_tensor_model_parallel_rank() == 0 else torch.zeros_like(total)


def compute_logits(layer: ReplicatedLinear, x: Tensor) -> object:
    """Replaces the forward of vLLM's router: x [T, H] -> fp32 logits [T, E]. vLLM stores the weights of some routers in
    float32, with values of the trainer's dtype."""
    if not layer.prefix.endswith(".gate") or layer.bias is not None:
        return ReplicatedLinear.forward(layer, x)  # `check` reports it
    logits = invariant.router_logits(x, layer.get_parameter("weight").to(x.dtype))
    return (logits, None) if layer.return_bias else logits


_PLAIN_ROUTERS = {"Glm4MoE"}
"""Classes of vLLM whose `gate` may be a plain layer. Their source was read."""


class PlainRouter(nn.Linear):
    """The router of a model for which vLLM uses a plain layer with float32 weights, and inputs cast to float32. The
    values are those of the model's dtype."""

    model_dtype: torch.dtype

    def forward(self, input: Tensor) -> Tensor:
        return invariant.router_logits(input.to(self.model_dtype), self.weight.to(self.model_dtype))


def replace_plain_routers(model: nn.Module) -> None:
    """Makes the plain routers of a model compute our logits. vLLM has no registry for plain layers of PyTorch."""
    dtype = next(model.parameters()).dtype
    for module in model.modules():
        router = getattr(module, "gate", None)
        if type(module).__name__ not in _PLAIN_ROUTERS or router is None:
            continue
        if type(router) is nn.Linear and router.bias is None:
            router.__class__ = PlainRouter
            router.model_dtype = dtype


def scale_weights(model: nn.Module) -> None:
    """Makes the weights of experts include the factor with which vLLM would multiply the rounded sum of a layer, as in
    the trainer."""
    for module in model.modules():
        if isinstance(module, MoERunner) and isinstance(module.routed_experts.quant_method, InvariantExperts):
            module.routed_experts.routed_scaling_factor *= module.routed_scaling_factor
            module.routed_scaling_factor = 1.0


def why_not_ours(experts: RoutedExperts) -> str | None:
    """Returns why a layer of experts does not compute with our operators, or None."""
    if not isinstance(experts.quant_method, InvariantExperts):
        return f"experts with {type(experts.quant_method).__name__}"
    parts = {
        "scores of another kind": experts.scoring_func not in ("softmax", "sigmoid"),
        "groups of experts": (experts.use_grouped_topk and experts.num_expert_group not in (None, 1))
        or experts.custom_routing_function is not None,
        "router biases": experts.e_score_correction_bias is not None and experts.scoring_func != "sigmoid",
        "experts with biases": experts.moe_config.has_bias,
        "another activation": experts.activation.value != "silu",
        "weights before the experts": experts.apply_router_weight_on_input,
        "fp8 on a GPU": LinearMethod.fp8_scales is not None and experts.get_parameter("w2_weight").is_cuda,
    }
    return next((name for name, there in parts.items() if there), None)
