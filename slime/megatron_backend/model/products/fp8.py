"""`--fp8-recipe blockwise`: the linear layers of a Megatron model compute with rl_kernel.fp8.

The products of attention, MLPs and experts change, in every layer that the flags do not exclude. The head, embeddings,
routers, gated delta nets, Mamba-2 layers, the vision tower and the layers of multi-token prediction keep the dtype of
the weights. Parameters, their gradients and the optimizer do not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor, nn

from rl_kernel import fp8
from slime import operators
from slime.config import Config
from slime.megatron_backend.model.moe.experts import GatedExperts
from slime.megatron_backend.model.moe.main_grads import take_main_grads
from slime.megatron_backend.model.products.linear import LAYERS, Owner
from slime.megatron_backend.model.recurrent.gated_delta_net import GatedDeltaNet
from slime.megatron_backend.model.recurrent.mamba import MambaMixer
from slime.records.errors import FlagError


def use_fp8(parts: Sequence[nn.Module], config: Config, layers: int) -> None:
    """Makes the linear layers of the model's parts compute in fp8. `layers` is the number of layers of the whole model.

    Raises ValueError on a device without fp8.
    """
    device = next(parts[0].parameters()).device
    if reason := fp8.refusal(device):
        raise FlagError(
            "--fp8-recipe",
            "be left out on a device without fp8",
            f"blockwise on {device}, where {reason}",
            "leave --fp8-format and --fp8-recipe out",
        )
    products = config.kernels.rlk_fp8_products
    if reason := fp8.products_refusal(products, device):
        raise FlagError(
            "--rlk-fp8-products", f"be torch on {device}", f"{products}, but {reason}", "leave it out"
        )
    fp8.choose_products(products, device)
    power_of_two = config.megatron.force_fp8_ue8m0_scale
    forward = Fp8Forward(
        power_of_two, invariant="product" in operators.bitwise(config), adds=products == "deepgemm"
    )
    for part in parts:
        model: GPTModel = part
        for layer in model.decoder.layers:
            if config.megatron.computes_in_fp8(layer.layer_number - 1, layers):
                for module in _products(layer):
                    if isinstance(module, GatedExperts):
                        module.fp8_powers, module.fp8_adds = power_of_two, forward.adds
                    else:
                        module._forward_impl = forward
                        gathers = isinstance(module, ColumnParallelLinear) and module.sequence_parallel
                        module.rounds_input = not gathers


def _products(module: nn.Module) -> Iterator[Owner]:
    """Yields the linear layers and the groups of experts in a module."""
    if isinstance(module, (GatedExperts, *LAYERS)):
        yield module
    elif not isinstance(module, (GatedDeltaNet, MambaMixer)):
        for child in module.children():
            yield from _products(child)


@dataclass(frozen=True)
class Fp8Forward:
    """Replaces the product of a linear layer. A call has the arguments that Megatron's layers pass."""

    power_of_two: bool
    invariant: bool
    adds: bool = False
    """The backward adds the weights' gradients to Megatron's float32 buffers."""

    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        **unused: object,
    ) -> Tensor:
        product = fp8.linear(
            input,
            weight,
            power_of_two=self.power_of_two,
            invariant=self.invariant,
            group=tp_group if allreduce_dgrad or sequence_parallel else None,
            gather=sequence_parallel,
            weight_grad=self._get_sum(weight) if self.adds and torch.is_grad_enabled() else None,
        )
        return product if bias is None else product + bias

    @staticmethod
    def _get_sum(weight: Tensor) -> Tensor | None:
        """Returns the buffer to which the backward adds the weight's gradient, or None if autograd brings it there."""
        if weight.shape[0] % fp8.GROUP:
            return None
        return next(iter(take_main_grads([weight])), None)
