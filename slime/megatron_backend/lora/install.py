"""Adds adapters to the products of a model, and switches them off for the reference model.

The adapters are in one container of the model, `adapters`, under the names of their products in the whole model. So
checkpoints, optimizer and export find them there, and the names of the base's parameters do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from slime.megatron_backend.lora.adapters import Adapter, ExpertAdapter, Slot
from slime.megatron_backend.model.layers import NormedLinear
from slime.megatron_backend.model.moe.experts import GatedExperts
from slime.megatron_backend.model.parameter_names import whole_model_name
from slime.models import family_for
from slime.models.layouts import Row
from slime.models.lora import Lora, get_adapted_module, linear_rows
from slime.models.slices import pieces

AnyAdapter = Adapter | ExpertAdapter


class Adapters(nn.ModuleDict):
    """The adapters of a model's part on this rank. A key is the name of the product, with "/" instead of "."."""

    lora: Lora
    base: str | None = None
    """Digest of the base (slime.megatron_backend.lora.base); None before the base is loaded."""

    def of(self) -> Iterator[tuple[str, AnyAdapter]]:
        for name, adapter in self.items():
            assert isinstance(adapter, AnyAdapter)
            yield name, adapter

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns shards with global shapes, so that another layout of ranks can load them."""
        found: dict[str, Any] = {}
        for name, adapter in self.of():
            state = adapter.state_dict(keep_vars=True)
            axes = {key: value.axis for key, value in state.items() if value.axis is not None}
            if isinstance(adapter, ExpertAdapter):
                found |= _expert_shards(state, f"{prefix}{name}.")
            else:
                found |= make_sharded_tensors_for_checkpoint(state, f"{prefix}{name}.", axes)
        return found


def _expert_shards(state: dict[str, Tensor], prefix: str) -> dict[str, Any]:
    """Returns the shards of this rank's experts. Their replicas are on the ranks of the experts' data parallelism."""
    group = parallel_state.get_expert_model_parallel_group()
    replica = (0, 0, parallel_state.get_expert_data_parallel_rank())
    return {
        prefix + key: ShardedTensor.from_rank_offsets(
            prefix + key, value, (0, group.rank(), group.size()), replica_id=replica
        )
        for key, value in state.items()
    }


def add_adapters(parts: Sequence[Any], lora: Lora, seed: int) -> None:
    """Adds the adapters with their first values to the model's parts. Collective. `parts` have no data-parallel
    wrappers.

    Raises ValueError for targets that match no module, experts that tensor parallelism splits, or layers of Transformer
    Engine.
    """
    check_targets(parts, lora)
    for inner in parts:
        owners = find_owners(inner)
        weights = {path.replace(".", "/"): of_product[0] for path, _, _, of_product in products(inner)}
        inner.adapters = make_adapters(inner, lora, seed)
        for name, adapter in inner.adapters.of():
            attach(owners[id(weights[name])], name, adapter.added, experts=isinstance(adapter, ExpertAdapter))


def make_adapters(inner: nn.Module, lora: Lora, seed: int) -> Adapters:
    """Returns adapters with their first values for a part of the model. The part does not call them yet (`attach`)."""
    made = Adapters()
    made.lora = lora
    for path, row, modules, weights in products(inner):
        targets = [n for n, module in enumerate(modules) if lora.adapts(module.replace("{e}", "0"))]
        if not targets:
            continue
        name = path.replace(".", "/")
        adapter: AnyAdapter
        if row.is_expert:
            adapter = _expert_adapter(inner, lora, row, modules, weights, targets)
        else:
            adapter = _adapter(inner, lora, row, modules, weights[0], targets)
        adapter.fill(seed, name)
        made[name] = adapter
    return made


def check_targets(parts: Sequence[Any], lora: Lora) -> None:
    """Raises ValueError unless each target matches a module of the whole model. Collective."""
    modules = (module for inner in parts for _, _, modules, _ in products(inner) for module in modules)
    mine = {module.replace("{e}", "0") for module in modules}
    of_ranks: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    lora.check(set().union(*of_ranks))


def products(inner: Any) -> Iterator[tuple[str, Row, list[str], list[nn.Parameter]]]:
    """Yields the products of this part that can have an adapter: name in the whole model, row, HF modules, and weights.
    The experts of a layer are one product with several weights; "{e}" replaces their number."""
    family = family_for(inner.hf_config)
    rows = set(linear_rows(family))
    experts: dict[str, tuple[Row, list[str], list[nn.Parameter]]] = {}
    for local, parameter in inner.named_parameters():
        if local.startswith("adapters.") or not local.startswith("decoder.layers."):
            continue
        name = whole_model_name(inner, local)
        row, _ = family.find(name)
        if row not in rows:
            continue
        layer = name.split(".")[2]
        modules = [get_adapted_module(hf, family).replace("{i}", layer) for hf in row.hf]
        path = name.removesuffix(".weight")
        if not row.is_expert:
            yield path, row, modules, [parameter]
            continue
        head, _, tail = path.partition("local_experts.")
        key = f"{head}{tail.partition('.')[2]}"
        experts.setdefault(key, (row, modules, []))[2].append(parameter)
    for path, (row, modules, weights) in experts.items():
        yield path, row, modules, weights


def _adapter(
    inner: Any, lora: Lora, row: Row, modules: list[str], weight: nn.Parameter, targets: list[int]
) -> Adapter:
    rank = parallel_state.get_tensor_model_parallel_rank()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    layout, axis = row.layout, row.layout.axis
    whole = layout.merge([weight.data.to("meta")] * ranks)
    shapes = tuple(tuple(part.shape) for part in layout.split(whole, inner.sizes))
    found = pieces(layout, shapes, inner.sizes, rank, ranks) if axis == 0 else ()
    slots: list[Slot] = []
    indices: list[int] = []
    for part, (module, shape) in enumerate(zip(modules, shapes, strict=True)):
        mine = sorted((p for p in found if p.part == part), key=lambda p: p.source)
        first = mine[0].source if mine else 0
        rows = sum(p.length for p in mine) if mine else shape[0]
        assert not mine or mine[-1].source + mine[-1].length == first + rows, (
            "a rank has neighbouring rows of a module"
        )
        slots.append(Slot(module, shape[0], shape[1], first, rows))
        for piece in mine:
            indices += piece.targets
    order = None
    if axis == 0 and indices != list(range(len(indices))):
        order = torch.empty(len(indices), dtype=torch.int64)
        order[torch.tensor(indices)] = torch.arange(len(indices))
        order = order.to(weight.device)
    sequence = inner.config.sequence_parallel
    return Adapter(lora, slots, targets, weight, axis=axis, order=order, sequence=sequence)


def _expert_adapter(
    inner: Any, lora: Lora, row: Row, modules: list[str], weights: list[nn.Parameter], targets: list[int]
) -> ExpertAdapter:
    unit = 16 // weights[0].element_size()
    if lora.rank % unit:
        raise ValueError(
            f"--lora-rank must be a multiple of {unit} with adapters of experts in {weights[0].dtype}, got "
            f"{lora.rank}; change it, or leave experts out of --target-modules"
        )
    if (size := inner.config.expert_tensor_parallel_size or 1) > 1:
        raise ValueError(
            f"--expert-tensor-parallel-size must be 1 with adapters of experts, got {size}; set it, or leave "
            "experts out of --target-modules"
        )
    shapes = [part.shape for part in row.layout.split(weights[0].data.to("meta"), inner.sizes)]
    slots = [
        Slot(module, shape[0], shape[1], 0, shape[0]) for module, shape in zip(modules, shapes, strict=True)
    ]
    return ExpertAdapter(lora, slots, targets, weights)


def find_owners(inner: nn.Module) -> dict[int, nn.Module]:
    """Returns weight id -> module that computes with the weight. The weight of an expert maps
    to the module of the layer's experts."""
    found: dict[int, nn.Module] = {}
    for module in inner.modules():
        whole = isinstance(module, GatedExperts)
        found |= {id(p): module for p in module.parameters(recurse=whole) if id(p) not in found}
    return found


def attach(owner: Any, name: str, added: Callable[..., Tensor], *, experts: bool) -> None:
    """Replaces the output of a product's module `owner` by `added(output, input, ...)`. `name` is the product's name in
    `Adapters`. `experts` means that a layer's experts compute the product."""
    if experts:
        owner.adapted[0 if "linear_fc1" in name else 1] = added
        return
    if isinstance(owner, NormedLinear):
        owner.adapted = added
        return

    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> object:
        if isinstance(output, tuple):
            return added(output[0], inputs[0]), *output[1:]
        return added(output, inputs[0])

    owner.register_forward_hook(hook)


def find_adapters(inner: object) -> Iterator[tuple[str, AnyAdapter]]:
    """Yields the adapters of a model's part by the names of their products, in the order of the layers. Empty for a
    model without adapters."""
    adapters = getattr(inner, "adapters", None)
    if adapters is not None:
        yield from adapters.of()


def find_lora(inner: object) -> Lora | None:
    """Returns the settings of the adapters of a model's part, or None without adapters."""
    adapters = getattr(inner, "adapters", None)
    return None if adapters is None else adapters.lora


@contextmanager
def without_adapters(parts: Sequence[object]) -> Iterator[None]:
    """Switches the adapters off in the block, so that the model is its base."""
    found = [adapter for inner in parts for _, adapter in find_adapters(inner)]
    for adapter in found:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in found:
            adapter.enabled = True
