"""Finds the modules of a vLLM model that compute with other operators than those of rl_kernel.invariant."""

from __future__ import annotations

from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import ReplicatedLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from vime.vllm.worker.bitwise import experts
from vime.vllm.worker.bitwise.attention import why_not_ours
from vime.vllm.worker.bitwise.layers import LAYERS, OPERATORS
from vime.vllm.worker.bitwise.products import HeadMethod, LinearMethod

_PASSES_ON = {
    "ModuleList",
    *("Qwen3ForCausalLM", "Qwen3Model", "Qwen3DecoderLayer", "Qwen3Attention", "Qwen2MLP", "Qwen3MLP"),
    *("Qwen2ForCausalLM", "Qwen2Model", "Qwen2DecoderLayer", "Qwen2Attention"),
    *("LlamaForCausalLM", "LlamaModel", "LlamaDecoderLayer", "LlamaAttention", "LlamaMLP"),
    *("MistralForCausalLM", "MistralModel", "MistralDecoderLayer", "MistralAttention", "MistralMLP"),
    *("MiMoForCausalLM", "MiMoModel"),
    *("Qwen3MoeForCausalLM", "Qwen3MoeModel", "Qwen3MoeDecoderLayer", "Qwen3MoeAttention", "Qwen3MoeMLP"),
    *(
        "Glm4MoeForCausalLM",
        "Glm4MoeModel",
        "Glm4MoeDecoderLayer",
        "Glm4MoeAttention",
        "Glm4MoE",
        "Glm4MoeMLP",
    ),
    *("Qwen3MoeSparseMoeBlock", "SharedExperts"),
    "GroupedTopk",  # it chooses experts, and our method of experts does not call it
    "ApplyRotaryEmb",  # a part of vLLM's rotary embedding, which our class does not call
}
"""vLLM's classes that only call other modules. Their source was read."""


def not_ours(model: nn.Module) -> list[str]:
    """Returns "PATH (REASON)", sorted, for each module that is not our class, and for our modules with another
    operator."""
    return sorted(
        f"{path or 'the model'} ({reason})"
        for path, module in model.named_modules()
        if (reason := _reason(path, module)) is not None
    )


def _reason(path: str, module: nn.Module) -> str | None:
    name = type(module).__name__
    if name == "MistralAttention" and module.do_llama_4_scaling:
        return "MistralAttention with queries that grow with their position"
    if type(module) in (*OPERATORS.values(), experts.PlainRouter) or name in _PASSES_ON:
        return None
    if type(module) in LAYERS.values():
        method = module.quant_method
        if not isinstance(method, (LinearMethod, HeadMethod)):
            return f"{name} with {type(method).__name__}"
        if isinstance(module, ReplicatedLinear) and (not path.endswith(".gate") or module.bias is not None):
            return "a replicated layer that is no router, or a router with a bias"
        return _other_sum(path, module) if isinstance(module, RowParallelLinear) else None
    if isinstance(module, RoutedExperts):
        return experts.why_not_ours(module)
    if isinstance(module, MoERunner):
        return _other_runner(module)
    if isinstance(module, Attention):
        return why_not_ours(module.impl)
    if isinstance(module, LogitsProcessor):
        return None if module.soft_cap is None and module.scale == 1 else "scaled or capped logits"
    return name


def _other_runner(runner: MoERunner) -> str | None:
    """Returns why the sum of a layer's experts and shared expert over ranks differs from the trainer's, or None."""
    parts = {
        "a scaled sum of experts": runner.routed_scaling_factor != 1,
        "experts in sequence parallel": runner.moe_config.is_sequence_parallel,
        "experts without their sum over ranks": runner.moe_config.skip_final_all_reduce,
        "experts with projections": runner.routed_input_transform is not None
        or runner.routed_output_transform is not None,
    }
    return next((name for name, there in parts.items() if there), None)


def _other_sum(path: str, layer: RowParallelLinear) -> str | None:
    """Returns why a sum over ranks differs from the sum of the trainer's corresponding layer, or None."""
    if layer.tp_size == 1:
        return None
    if not layer.input_is_parallel:
        return "a row-parallel layer that splits its input"
    if layer.reduce_results or ".shared_experts." in path:  # vLLM's sum adds the zeros of the other ranks
        return None
    return "a row-parallel layer without its sum"
