"""Reads the experts of a live vLLM layer back into HF tensors, one per expert and projection.

vLLM keeps a layer's experts in two parameters, w13 [E, 2 F, H] (gate above up) and w2 [E, H, F]. Experts without a gate
have w13 [E, F, H] (up). Each kernel has its own order of elements. This file can read the plain order and the order of
the CPU kernels; any other order is an error.
With expert parallelism, each rank of an engine has some of the experts and compares those experts.

Shapes: E experts, F width of an expert on this rank, H hidden.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vime.vllm.versions import mapped_name

if TYPE_CHECKING:
    from vllm.model_executor.models.utils import WeightsMapper

_PLAIN = ("TRITON", "BATCHED_TRITON")


def has_experts(module: nn.Module) -> bool:
    """Returns True if `module` holds a layer's experts."""
    return {"w13_weight", "w2_weight"} <= {name for name, _ in module.named_parameters(recurse=False)}


def hf_path(path: str, shared: str) -> str:
    """Returns a module's path in the checkpoint.

    In vLLM, the router and the shared expert are also parts of the experts, under a second name. The projections of
    latent attention are also parts of its kernel. `shared` is the shared expert's name in files, "shared_expert" or
    "shared_experts".
    """
    path = re.sub(r"\.self_attn(\.mla_attn)+(?=\.|$)", ".self_attn", path)
    path = re.sub(r"\.experts\.gate$", ".gate", path)
    path = re.sub(r"\.experts\._shared_experts\._layer(?=\.|$)", f".{shared}", path)
    return re.sub(rf"\.{shared}\.expert_gate$", f".{shared}_gate", path)


_SPELLINGS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of an expert's gate, up and down projections in files."""


def expert_tensors(
    path: str, module: Any, update: Collection[str], files: Mapping[str, str]
) -> Iterator[tuple[str, object, torch.Tensor]]:
    """Yields (HF name, holder of tp_rank and tp_size, value on this rank) for every expert of `module`, found at
    `path`.

    `update` holds the HF names and vLLM's, which decide how a projection is spelled. `files` maps vLLM's names to HF
    names, for files that stack the experts of a layer.
    """
    w13, w2 = (_plain(module, getattr(module, name).data) for name in ("w13_weight", "w2_weight"))
    width, padded = module.moe_config.intermediate_size_per_partition, w2.shape[2]
    width = getattr(module.moe_config, "intermediate_size_per_partition_unpadded", None) or width
    parent = path.removesuffix(".routed_experts")
    if f"{parent}.w13_weight" in files:
        if module.expert_map is not None:
            raise ValueError(
                "stacked experts must be whole on each rank of an engine to be compared, got some of them; leave out "
                "--vllm-enable-expert-parallel or --check-weight-update-equal"
            )
        stacked = _stacked(module, w13[:, : 2 * width], w2[:, :, :width])
        yield from ((files[f"{parent}.{name}"], holder, value) for name, holder, value in stacked)
        return
    if f"{parent}.gate_up_proj" in update:
        gates, ups = w13[:, :width], w13[:, padded : padded + width]
        stack = _Stack(local_experts(module, len(w13)), module.moe_config.moe_parallel_config, w13.shape[2])
        yield f"{parent}.gate_up_proj", replace(stack, parts=2), torch.cat((gates, ups), 1).transpose(1, 2)
        yield f"{parent}.down_proj", replace(stack, axis=1), w2[:, :, :width].transpose(1, 2)
        return
    for index, expert in enumerate(local_experts(module, len(w13))):
        rows = [w13[index, first : first + width] for first in range(0, w13.shape[1], padded)]
        pieces = [*rows, w2[index, :, :width]]
        for name, piece in zip(
            _names(path, expert, update, module.moe_config.is_act_and_mul), pieces, strict=True
        ):
            yield name, module.moe_config.moe_parallel_config, piece


def local_experts(module: Any, local: int) -> list[int]:
    """Returns the indices of the `local` experts of this rank, in the order of its parameters."""
    # [E]: the index of each expert on this rank, -1 for experts elsewhere
    numbers: torch.Tensor | None = module.expert_map
    if numbers is None:
        return list(range(local))
    return [int(expert) for expert in (numbers >= 0).nonzero()[:, 0][numbers[numbers >= 0].argsort()]]


def alike_experts(models: Iterable[nn.Module]) -> set[nn.Module]:
    """Returns the layers of experts that lie between the first and the last layer of their kind.

    Layers of one kind have equal classes, parameters and maps of experts, so vLLM loads their experts in the same way.
    """
    kinds: dict[tuple[object, ...], list[nn.Module]] = {}
    for module in (each for model in models for each in model.modules() if has_experts(each)):
        experts: torch.Tensor | None = getattr(module, "expert_map", None)
        kind = (
            type(module),
            type(getattr(module, "quant_method", None)),
            _backend(module),
            tuple((name, x.shape, x.dtype) for name, x in module.named_parameters(recurse=False)),
            None if experts is None else tuple(experts.tolist()),
        )
        kinds.setdefault(kind, []).append(module)
    return {module for alike in kinds.values() for module in alike[1:-1]}


def list_remote_experts(path: str, module: Any, update: Collection[str]) -> Iterator[str]:
    """Yields HF names of the experts of `module` that other ranks of the engine have."""
    if module.expert_map is not None:
        for expert in (module.expert_map < 0).nonzero()[:, 0].tolist():
            yield from _names(path, expert, update, module.moe_config.is_act_and_mul)


def _names(path: str, expert: int, update: Collection[str], gated: bool) -> list[str]:
    """Returns HF names of gate, up and down of an expert, or of up and down if experts have no gate."""
    parent = path.removesuffix(".routed_experts")
    first = 0 if gated else 1
    spelled = [names for names in _SPELLINGS if f"{parent}.0.{names[first]}.weight" in update]
    return [f"{parent}.{expert}.{projection}.weight" for projection in (spelled or _SPELLINGS)[0][first:]]


@dataclass(frozen=True)
class _SecondBias:
    """The bias of the second product. The first rank adds the bias, and the others hold zeros."""

    tp_rank: int

    def piece(self, full: torch.Tensor) -> torch.Tensor:
        return full if self.tp_rank == 0 else torch.zeros_like(full)


@dataclass(frozen=True)
class _Stack:
    """A tensor [E, inputs, outputs] with all experts of a layer, in the form of Qwen3-VL's files: gate before up along
    the outputs. A rank has the experts with the indices `experts`, and its piece of `axis`, in each of `parts`.

    Files of Gemma 4 have [E, outputs, inputs]. The index of the dimension H = `hidden` shows the form. A tensor with
    equal sizes has the first form."""

    experts: list[int]
    ranks: Any
    hidden: int
    parts: int = 1
    axis: int = 2

    def piece(self, full: torch.Tensor) -> torch.Tensor:
        if full.shape[3 - self.axis] != self.hidden:
            full = full.transpose(1, 2)
        pieces = (part.chunk(self.ranks.tp_size, self.axis) for part in full.chunk(self.parts, self.axis))
        return torch.cat([each[self.ranks.tp_rank] for each in pieces], self.axis)[self.experts]


def _stacked(module: Any, w13: torch.Tensor, w2: torch.Tensor) -> Iterator[tuple[str, object, torch.Tensor]]:
    """Yields (vLLM's name, holder, value) of the tensors that files have for all experts of a layer: weights [E,
    inputs, outputs] and biases [E, outputs]. In w13, gate and up alternate, as in the files."""
    ranks = module.moe_config.moe_parallel_config
    yield "w13_weight", ranks, w13.transpose(1, 2)
    yield "w2_weight", ranks, w2.transpose(1, 2)
    yield "w13_bias", ranks, module.w13_bias.data[:, : w13.shape[1]]
    yield "w2_bias", _SecondBias(ranks.tp_rank), module.w2_bias.data


def stacks_experts(model: nn.Module) -> bool:
    """Returns True if vLLM reads a layer's experts from stacked tensors and copies them, and attention sinks, without a
    loader."""
    mapper: WeightsMapper | None = getattr(model, "hf_to_vllm_mapper", None)
    return mapper is not None and mapped_name(mapper, "mlp.experts.gate_up_proj") == "mlp.experts.w13_weight"


def exclude_from_reload(model: nn.Module, kept: Collection[nn.Module]) -> None:
    """Takes the modules in `kept`, and modules whose tensors vLLM copies without a loader, out of a layerwise reload
    that has begun.

    vLLM's reload replaces parameters by empty ones and collects the tensors that their loaders get. A copy without a
    loader writes into an empty parameter and is lost: the engine would continue with the old experts and sinks, without
    an error.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    stacked = stacks_experts(model)
    for module in model.modules():
        copied = stacked and (has_experts(module) or "sinks" in dict(module.named_parameters(recurse=False)))
        if copied or module in kept:
            info = layerwise.get_layerwise_info(module)
            layerwise._place_kernel_tensors(module, info)
            reset: Callable[[], None] = info.reset  # untyped in vLLM
            reset()


def repack_experts(model: nn.Module) -> None:
    """Packs experts into the layout that vLLM's CPU kernel reads.

    vLLM packs them at the first load only. A reload copies plain weights to an address where the kernel expects packed
    weights, and the engine would continue with wrong log-probs, without an error.
    """
    for module in model.modules():
        if (kernel := _cpu_kernel(module)) is not None:
            kernel.process_weights_after_loading(module)


def _backend(module: nn.Module) -> str | None:
    method = getattr(module, "quant_method", None)
    return getattr(getattr(method, "unquantized_backend", None), "name", None)


def keeps_plain_experts(module: nn.Module) -> bool:
    """Returns True if vLLM's kernel computes with experts as they are loaded."""
    return _backend(module) in _PLAIN or getattr(getattr(module, "quant_method", None), "keeps_plain", False)


def _cpu_kernel(module: nn.Module) -> Any | None:
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    return kernel.fused_experts if _backend(module) == "CPU" and kernel is not None else None


def _plain(module: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """Returns `weight` [E, rows, columns] in the order of its shape."""
    kernel = _cpu_kernel(module)
    if keeps_plain_experts(module) or getattr(kernel, "_use_zentorch", False):
        return weight
    if kernel is None:
        raise ValueError(
            f"vLLM's kernel of experts must be one of {', '.join(_PLAIN)} and CPU to be compared, got "
            f"{_backend(module)}; choose it with --vllm-moe-backend triton, or leave out --check-weight-update-equal"
        )
    plain = torch.empty_like(weight).flatten(1)
    plain[:, _order(weight.shape[1:], weight.dtype, kernel.isa)] = weight.flatten(1)
    return plain.view_as(weight)


@functools.cache
def _order(shape: torch.Size, dtype: torch.dtype, isa: str) -> torch.Tensor:
    """Returns, for each element of a packed matrix, its position in the plain matrix, [rows * columns] int64.

    vLLM's own function packs the positions, one byte per pass, because every dtype holds a byte exactly.
    """
    from vllm._custom_ops import cpu_prepack_moe_weight

    return packed_positions(shape, dtype, lambda digits: cpu_prepack_moe_weight(digits[None], isa)).flatten()


def packed_positions(shape: torch.Size, dtype: torch.dtype, pack: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns, for each element of `pack(tensor)`, its position in a tensor of `shape`, int64 in the same shape."""
    positions = torch.arange(shape.numel()).view(shape)
    packed = torch.zeros_like(positions)
    for shift in range(0, shape.numel().bit_length(), 8):
        digits = ((positions >> shift) & 255).to(dtype)
        packed += pack(digits).view(shape).long() << shift
    return packed
