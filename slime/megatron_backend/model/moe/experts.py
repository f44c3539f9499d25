"""Layers with routed experts: their Megatron settings from config.json, and their part of the layer spec.

    tokens -> router -> top-k experts of each token -> sum over them of weight x expert(token) [+ shared expert(token)]

Scores are a softmax over the experts (Qwen) or a sigmoid per expert (GLM; DeepSeek-V3, 2412.19437, part 2.1.2). GLM
adds a correction bias to the scores that choose experts, but not to the weights of the sum. The bias stays frozen,
because no gradient reaches it. An update by load, as in pre-training, would change the policy that the engine sampled
from without a reason in the loss.

The router computes in fp32 for every dtype of the model. No token is dropped and there is no auxiliary loss, because
reinforcement learning must train the policy that the engine sampled from.

Shapes: T tokens, H hidden, F width of an expert, C (token, expert) pairs, sorted by expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
)
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from slime.config import Config
from slime.config.fields import spelled
from slime.megatron_backend.model.activations import Gated, weighted
from slime.megatron_backend.model.attention import PackedLayout
from slime.megatron_backend.model.moe.expert_dispatch import GatheringDispatcher, gathers
from slime.megatron_backend.model.moe.grouped_product import (
    Fp8Product,
    GroupedProduct,
    RoundedProduct,
    Rounding,
    expert_ends,
)
from slime.megatron_backend.model.norms import mark_whole
from slime.models import Decoder, Experts
from slime.rules.experts import check_expert_layout, check_expert_settings, check_expert_width

_FREE = {"moe_token_dispatcher_type", "moe_router_load_balancing_type"}
"""Settings of `expert_fields` that a flag may change."""


def expert_fields(decoder: Decoder, config: Config, overrides: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of TransformerConfig for the experts of a model. `config` has the layout of the ranks, and
    `overrides` the user's settings.

    `Experts.normalised` selects the weights of a token's experts: a softmax over the logits of the chosen experts, or
    the softmax over all experts without normalisation. Raises ValueError for a shape that Megatron cannot compute, or
    an override that would change the model.
    """
    experts = decoder.experts
    assert experts is not None
    if experts.topk == 1 and experts.normalised:
        raise ValueError(
            "norm_topk_prob in config.json must be False with num_experts_per_tok 1, got True; one expert's weight "
            "would always be 1, which megatron-core does not compute"
        )
    check_expert_layout(config, experts.count)
    check_expert_width(config, decoder)
    fields = {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.topk,
        "moe_ffn_hidden_size": experts.width,
        "moe_layer_freq": [int(sparse) for sparse in decoder.sparse],
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": config.megatron.expert_model_parallel_size,
        "expert_tensor_parallel_size": config.megatron.expert_tensor_parallel,
        "moe_shared_expert_intermediate_size": experts.shared or None,
        "moe_shared_expert_gate": experts.shared_gate,
        **_router_fields(experts),
    }
    check_expert_settings(overrides)
    for name, value in overrides.items():
        if name in fields and name not in _FREE and value != fields[name]:
            raise ValueError(
                f"{spelled(name)} must be {fields[name]}, as the checkpoint has it, got {value}; leave it out"
            )
    return fields


def _router_fields(experts: Experts) -> dict[str, Any]:
    """Returns the fields for the scores. With sigmoid scores, the router takes the best experts by score + bias within
    the best groups. Their weights are score / (sum of their scores) * scale."""
    sigmoid = experts.score == "sigmoid"
    if sigmoid and experts.topk > 1 and not experts.normalised:
        raise ValueError(
            "norm_topk_prob in config.json must be True with sigmoid scores, got False; megatron-core always "
            "normalises them"
        )
    groups, of_token = experts.groups or (None, None)
    if groups is not None and of_token is not None and experts.topk != 2 * of_token:
        raise ValueError(
            f"num_experts_per_tok in config.json must be twice topk_group where n_group is above 1, got {experts.topk} "
            f"and {of_token}; megatron-core ranks a group by its best {experts.topk // of_token} experts, the "
            "checkpoint by 2"
        )
    fields = {
        "moe_router_score_function": experts.score,
        # Megatron reads this for softmax only; launch scripts of models with sigmoid scores set it
        "moe_router_pre_softmax": sigmoid or not experts.normalised,
        "moe_router_enable_expert_bias": experts.bias,
        "moe_router_num_groups": groups,
        "moe_router_group_topk": of_token,
        "moe_router_topk_scaling_factor": experts.scale,
    }
    return fields | ({"moe_router_bias_update_rate": 0.0} if experts.bias else {})


class RouterLogits(torch.autograd.Function):
    """Computes `x.float() @ weight.float().T` for x [T, H] and weight [E, H]. Autograd keeps both in their own
    dtypes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.float() @ weight.float().T

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return (upstream @ weight.float()).to(x.dtype), (upstream.T @ x.float()).to(weight.dtype)


Topk = Callable[..., tuple[Tensor, Tensor]]
"""Chooses experts: maps the arguments of `LayerRouting.get_replay_topk` to values and ids [T, K]."""


def _own_topk(
    scores: Tensor, topk: int, num_groups: object, group_topk: object, own: Topk
) -> tuple[Tensor, Tensor]:
    """Returns the choice of a router without a replay, from Megatron's function `own`."""
    return own(scores, topk, num_groups=num_groups, group_topk=group_topk)


class _Choice:
    """Megatron's hook for a replay of experts. It calls `choose`, and stores the ids that the router uses."""

    ids: Tensor

    def __init__(self, choose: Topk) -> None:
        self._choose = choose

    def get_replay_topk(self, *call: object) -> tuple[Tensor, Tensor]:
        values, self.ids = self._choose(*call)
        return values, self.ids


class Router(TopKRouter):  # type: ignore[misc]  # megatron-core has no types
    """Megatron's router without two parts that cannot run here. Its product calls a function of Transformer Engine,
    which may not be installed. Its count of tokens per expert, which only an update of the bias needs, is compiled at
    the first token."""

    expert_bias: Tensor | None

    def __init__(self, *args: Any, biases: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.router_replay = _Choice(_own_topk)
        if biases:
            self.bias = nn.Parameter(torch.empty(self.num_experts, dtype=self.weight.dtype))
            mark_whole(self.bias, self.config)

    def gating(self, input: Tensor) -> Tensor:
        """Maps [..., H] to fp32 logits [..., E]."""
        logits = RouterLogits.apply(input.flatten(0, -2), self.weight)
        if self.bias is not None:
            logits = logits + self.bias.float()
        unflattened: Tensor = logits.unflatten(0, input.shape[:-1])
        return unflattened

    def replay(self, routing: Any) -> None:
        """Sets the `slime.megatron_backend.step.routing_replay.Routing` of the next micro-batch, or None."""
        layer = self.layer_number - 1
        self.router_replay = _Choice(
            _own_topk if routing is None else routing.get_layer(layer).get_replay_topk
        )

    @property
    def chosen(self) -> Tensor:
        """Returns the experts of the last call's tokens, [T, K]."""
        return self.router_replay.ids

    def _apply_expert_bias(self, *unused: Any, **also_unused: Any) -> None: ...

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Keeps the bias in fp32 when the model is cast, because a rounded bias would choose other experts."""
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None:
            self.expert_bias = bias.to(cast(Tensor, self.expert_bias).device)
        return self


class BiasedFirst(ColumnParallelLinear):  # type: ignore[misc]  # megatron-core has no types
    """The first product of an expert with a bias."""

    def __init__(self, *args: Any, bias: bool, **kwargs: Any) -> None:
        super().__init__(*args, bias=True, **kwargs)


class BiasedSecond(RowParallelLinear):  # type: ignore[misc]  # megatron-core has no types
    """The second product of an expert with a bias."""

    def __init__(self, *args: Any, bias: bool, **kwargs: Any) -> None:
        super().__init__(*args, bias=True, **kwargs)
        # `GatedExperts` sums its gradient: the tensor-parallel ranks of the rest of the model have other experts
        self.bias.sequence_parallel = False


class GatedExperts(SequentialMLP):  # type: ignore[misc]  # megatron-core has no types
    """Megatron's experts with separate weights, computed together in two grouped products.

    The formula is Megatron's without fusion: `fc2((gated(fc1(x)) * weight).to(x.dtype))`, weights in fp32. If tensor
    parallelism splits experts, Megatron's dispatcher gathers their tokens and sums their outputs. The
    first rank in this group adds the biases of fc2 as `weight * bias`. `adapted` has, for each of the two products, the
    function that adds the output of adapters: (output, input, ends of the experts' rows) -> output. `rounding` has the
    functions that round the weights of the two products. With `fp8_powers`, the products are in fp8, and its value is
    whether scales are powers of two. With `fp8_adds`, these products add gradients to Megatron's float32 buffers.
    """

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, *args: Any, gated: Gated, **kwargs: Any
    ) -> None:
        super().__init__(num_local_experts, config, *args, **kwargs)
        self.gated = gated
        self.rounding: list[Rounding | None] = [None, None]
        self.fp8_powers: bool | None = None
        self.fp8_adds = False
        self.adapted: list[Callable[[Tensor, Tensor, Tensor], Tensor] | None] = [None, None]
        if config.expert_tensor_parallel_size != config.tensor_model_parallel_size:
            # Megatron sets this mark only if EP is above 1: the gradients are summed over the expert's own replicas
            for parameter in self.parameters():
                mark: Any = parameter
                mark.allreduce = False

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Maps tokens [C, H] sorted by expert, number of tokens per expert [E] on any device, weights [C] to [C, H]."""
        tokens = permuted_local_hidden_states
        ends = expert_ends(tokens_per_expert, tokens.device)
        gate_and_up = self.product(0, tokens, ends, [e.linear_fc1.weight for e in self.local_experts])
        first, second = self.adapted
        if first is not None:
            gate_and_up = first(gate_and_up, tokens, ends)
        biased = self.local_experts[0].linear_fc2.bias is not None
        if biased:
            expert_of = torch.bucketize(torch.arange(len(tokens), device=ends.device), ends, right=True)
            gate_and_up = (
                gate_and_up + torch.stack([e.linear_fc1.bias for e in self.local_experts])[expert_of]
            )
        gated = weighted(self.gated, gate_and_up, permuted_probs)
        output = self.product(1, gated, ends, [e.linear_fc2.weight for e in self.local_experts])
        if second is not None:
            output = second(output, gated, ends)
        if biased:
            bias = copy_to_tensor_model_parallel_region(
                torch.stack([e.linear_fc2.bias for e in self.local_experts]), group=self.tp_group
            )
            share = float(self.tp_group.rank() == 0)
            output = output + (bias[expert_of] * (permuted_probs[:, None] * share)).to(output.dtype)
        return output, None

    def product(self, index: int, x: Tensor, ends: Tensor, weights: list[Tensor]) -> Tensor:
        """Returns the first (`index` 0) or second product: [C, K], ends of the experts' rows, E weights [N, K] -> [C,
        N]."""
        rounding = self.rounding[index]
        if self.fp8_powers is not None:
            product: Tensor = Fp8Product.apply(self.fp8_powers, self.fp8_adds, x, ends, *weights)
        elif rounding is None:
            product = GroupedProduct.apply(x, ends, *weights)
        else:
            product = RoundedProduct.apply(rounding, x, ends, *weights)
        return product


class ExpertLayer(MoELayer):  # type: ignore[misc]  # megatron-core has no types
    """Megatron's layer of experts, with `GatheringDispatcher` if few ranks share the experts."""

    def __init__(
        self, config: TransformerConfig, *args: object, pg_collection: object = None, **kwargs: object
    ) -> None:
        super().__init__(config, *args, pg_collection=pg_collection, **kwargs)
        if gathers(config):
            groups = pg_collection or get_default_pg_collection()
            self.token_dispatcher = GatheringDispatcher(
                self.local_expert_indices, self.router, config, groups
            )

    def prepare(self, layout: PackedLayout) -> None:
        """Prepares the layer for a call with the tokens of `layout`."""
        self.router.replay(layout.routing)
        if isinstance(self.token_dispatcher, GatheringDispatcher):
            self.token_dispatcher.prepare(layout)


def experts_spec(
    shared: type,
    gated: Gated,
    *,
    biases: bool,
    layer: type[ExpertLayer] = ExpertLayer,
    router: type[Router] = Router,
) -> ModuleSpec:
    """Returns the MLP slot of a layer with experts: `layer`, `router`, `GatedExperts`, and `shared` as the shared
    expert if the model has one. `gated` is the activation of both."""
    first, second = (BiasedFirst, BiasedSecond) if biases else (ColumnParallelLinear, RowParallelLinear)
    products = MLPSubmodules(linear_fc1=first, linear_fc2=second)
    return ModuleSpec(
        module=layer,
        submodules=MoESubmodules(
            experts=ModuleSpec(module=GatedExperts, submodules=products, params={"gated": gated}),
            router=functools.partial(router, biases=biases),
            shared_experts=ModuleSpec(module=shared, params={"gated": gated}),
        ),
    )
