"""Reads a live vLLM model back into HF tensors, so that it can be compared with the trainer's weights.

vLLM fuses projections, pads the vocabulary, shards over tensor-parallel ranks, and on CPUs replaces matrices by packed
copies that are not parameters. This file undoes these changes for vLLM's linear and embedding layers and for plain
parameters. vime.vllm.worker.live_experts does so for experts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from vime.vllm.versions import mapped_name, renames_alone
from vime.vllm.worker.live_experts import (
    expert_tensors,
    has_experts,
    hf_path,
    list_remote_experts,
    packed_positions,
)
from vime.vllm.worker.live_quantized import Quantized, is_quantized, quantized_pieces

if TYPE_CHECKING:
    from vllm.model_executor.models.utils import WeightsMapper


def differing_tensors(
    model: nn.Module,
    names: Iterable[str],
    get_tensor: Callable[[str], torch.Tensor],
    *,
    update: Collection[str] | None = None,
) -> list[str]:
    """Returns the HF names whose live value on this rank differs from `get_tensor(name)`, sorted.

    Values are compared exactly after a cast to the live dtype. -0.0 equals 0.0, because packed copies lose the sign of
    zero. `names` may be a part of an update; `update` then has the names of the whole update. Raises ValueError if a
    name is not live, or if a live tensor is not in the update. Other ranks of the engine compare their own experts.
    Names that contain `skipped_weights` of the model's class need not be live.
    """
    expected, seen, wrong = set(names), set(), set()
    update = expected if update is None else update
    for name, module, live in live_tensors(model, update):
        if name.endswith("lm_head.weight") and name not in update:
            name = next((other for other in update if other.endswith(".embed_tokens.weight")), name)
        if name not in update:
            raise ValueError(
                f"every live tensor must be in the update to be compared, got {name} in the model only"
            )
        if name not in expected:
            continue
        seen.add(name)
        if not holds(live, cut_shard(get_tensor(name), module, live.shape)):
            wrong.add(name)
    unseen = expected - seen - {"lm_head.weight"} - names_elsewhere(model, update)
    skipped: str | None = getattr(model, "skipped_weights", None)
    if unseen := {name for name in unseen if skipped is None or skipped not in name}:
        raise ValueError(
            f"every tensor of an update must be live to be compared, got {sorted(unseen)[:8]} in the file only"
        )
    return sorted(wrong)


def holds(live: torch.Tensor | Quantized, want: torch.Tensor) -> bool:
    """Returns True if a live value equals the update's value, cast to the live dtype or quantised."""
    if isinstance(live, Quantized):
        return live.holds(want)
    return torch.equal(live, want.to(live.device, live.dtype))


def names_elsewhere(model: nn.Module, update: Collection[str]) -> set[str]:
    """Returns the HF names of the experts that other ranks of the engine have."""
    files = _file_names(model, update)
    return {
        files.get(name, name)
        for path, module in model.named_modules()
        if has_experts(module)
        for name in list_remote_experts(path, module, {*update, *files})
    }


def live_tensors(
    model: nn.Module, update: Collection[str]
) -> Iterator[tuple[str, object, torch.Tensor | Quantized]]:
    """Yields (HF name, object with the tensor-parallel rank, value on this rank) of every weight that the model
    computes with.

    `update` has the HF names, which decide how files spell experts and whether they hold fused projections. A matrix
    with several copies (CPU embeddings, latent attention) is yielded once per copy. All tied modules are visited,
    because each may have a separate packed copy.
    """
    # the text model of a multimodal model has its own names of fused modules
    fused = (getattr(part, "packed_modules_mapping", None) or {} for part in (model, *model.children()))
    packed = {name: parts for of_part in fused for name, parts in of_part.items()}
    files = _file_names(model, update)
    known = {*update, *files}
    shared = "shared_expert" if any(".shared_expert." in name for name in update) else "shared_experts"
    visited = set[int]()
    for path, module in model.named_modules(remove_duplicate=False):
        again = id(module) in visited
        visited.add(id(module))
        found: Iterable[tuple[str, object, torch.Tensor | Quantized]]
        if has_experts(module):
            found = expert_tensors(path, module, known, files)
        else:
            path = hf_path(path, shared)
            found = _module_tensors(path, module, packed.get(path.rpartition(".")[2]), update, known)
        for name, holder, value in found:
            name = _source(name, known)
            name = files.get(name, name)
            if name in update or not again:  # else another path of a module that was visited under its name
                yield name, holder, value


def _source(name: str, known: Collection[str]) -> str:
    """Returns the name of the tensor that a live tensor holds. A projection without values in files holds the keys
    twice."""
    keys = name.replace(".v_proj.", ".k_proj.")
    return keys if name not in known and keys in known else name


def _module_tensors(
    path: str, module: Any, fused: list[str] | None, update: Collection[str], known: Collection[str]
) -> Iterator[tuple[str, object, torch.Tensor | Quantized]]:
    """Yields the tensors of a module without experts, whose path is `path`. `fused` has the names in files of the parts
    that vLLM fuses in the module. `known` has the names in `update`, and vLLM's names."""
    if hasattr(module, "W_UK_T"):
        yield f"{path}.kv_b_proj.weight", module.kv_b_proj, _read_latent_attention(module)
    parent, _, leaf = path.rpartition(".")
    parts = fused or [leaf]
    for kind, parameter in module.named_parameters(recurse=False):
        if kind in _LATENT_ATTENTION:
            continue
        if len(parts) > 1 and f"{parent}.{leaf}.{kind}" in update:
            parts = [leaf]
        for part, holder, value in _pieces(module, kind, parameter, parts):
            holder = DecayRates(module) if (leaf, kind) == ("mixer", "A") else holder
            yield ".".join(filter(None, [parent, part, kind])), holder, value
    for kind, buffer in module.named_buffers(recurse=False):
        if f"{path}.{kind}" in known:
            yield f"{path}.{kind}", module, buffer


def _pieces(
    module: nn.Module, kind: str, parameter: nn.Parameter, parts: list[str]
) -> Iterator[tuple[str, object, torch.Tensor | Quantized]]:
    """Yields (part, holder, value) for each part of a parameter. The scales of a quantised weight come with the
    weight."""
    if is_quantized(module) and kind.startswith("weight"):
        if kind == "weight":
            quantized = quantized_pieces(module, _rows(module, parts))
            yield from ((part, module, found) for part, found in zip(parts, quantized, strict=True))
        return
    for value in used_values(module, kind, parameter):
        for part, (holder, piece) in zip(parts, _split(module, value, parts), strict=True):
            yield part, holder, piece


def used_values(module: nn.Module, kind: str, parameter: nn.Parameter) -> list[torch.Tensor]:
    """Returns the values of a parameter that the module computes with, in the order of files."""
    values = [parameter.data] if parameter.numel() else []
    if kind == "weight" and hasattr(module, "_cpu_unpacked_conv_weight"):
        return [_plain_convolution(parameter.data)]
    if kind == "weight" and hasattr(module, "cpu_linear"):
        values.append(_packed_matrix(module))
    return values


def _file_names(model: nn.Module, update: Collection[str]) -> dict[str, str]:
    """Maps vLLM's name to the HF name, for a model whose class renames tensors while it reads them (gpt-oss,
    multimodal)."""
    mapper: WeightsMapper | None = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return {}
    mapper = renames_alone(mapper)
    return {ours: name for name in update if (ours := mapped_name(mapper, name)) not in (None, name)}


_LATENT_ATTENTION = ("W_UK_T", "W_UV")


def _read_latent_attention(module: Any) -> torch.Tensor:
    """Returns the matrix kv_b_proj [A * (K + V), L] of vLLM's latent attention from the copies that decoding uses:
    W_UK_T [A, K, L] and W_UV [A, L, V]."""
    keys, values = (getattr(module, name).data for name in _LATENT_ATTENTION)
    return torch.cat((keys, values.transpose(1, 2)), dim=1).flatten(0, 1)


def cut_shard(full: torch.Tensor, module: Any, shape: torch.Size) -> torch.Tensor:
    """Returns the piece of `full` that belongs to this tensor-parallel rank of `module`, given the piece's shape.

    Rows or columns are dealt out in rank order. With fewer pieces than ranks (key/value heads), neighbours share one
    piece.
    """
    if hasattr(module, "piece"):  # an object that computes its own piece
        return cast(torch.Tensor, module.piece(full))
    if full.shape == shape:
        return full
    if (
        full.dim() == 3 and full.numel() == shape.numel()
    ):  # a convolution [channels, 1, taps], kept as a matrix
        return full.reshape(shape)
    if hasattr(module, "shard_indices"):  # an embedding: rows of the vocabulary
        indices = module.shard_indices
        return full[indices.org_vocab_start_index : indices.org_vocab_end_index]
    sizes = getattr(module, "output_partition_sizes", ())
    if len(sizes) > 1 and sum(sizes) == shape[0]:  # fused in the file too: a rank has its part per projection
        return Fused(tuple(sizes), module.tp_rank, module.tp_size).piece(full)
    for dim, (whole, local) in enumerate(zip(full.shape, shape, strict=True)):
        if whole != local:
            pieces, (rank, ranks) = whole // local, _rank_and_size(module)
            full = full.narrow(dim, rank * pieces // ranks * local, local)
    return full


def _rank_and_size(module: Any) -> tuple[int, int]:
    """Returns (tensor-parallel rank, ranks) of a module. A module with plain parameters alone, such as sinks, does not
    store them."""
    if hasattr(module, "tp_rank"):
        return module.tp_rank, module.tp_size
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()


def repack_tied_weights(model: nn.Module) -> None:
    """Renews the packed copies of matrices that several modules share (a tied lm_head on CPUs).

    vLLM's layerwise reload renews only the copy of the module through which the tensor was loaded. The other modules
    would continue to compute with the old weights.
    """
    owners: dict[int, list[Any]] = {}  # modules of vLLM
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.numel() and hasattr(module, "cpu_linear"):
            owners.setdefault(weight.data_ptr(), []).append(module)
    for modules in owners.values():
        if len(modules) > 1:
            for module in modules:
                module.quant_method.process_weights_after_loading(module)


def _packed_matrix(module: Any) -> torch.Tensor:
    """Returns the matrix inside `module.cpu_linear`, [out, in], as its product with the identity.

    Products with 1 and sums with 0 are exact, so the values equal those of the packed copy to the bit, except for the
    sign of zeros.
    """
    # sizes of a shard, a router, an embedding
    names = ("input_size_per_partition", "input_size", "embedding_dim")
    size = next(getattr(module, name) for name in names if getattr(module, name, None))
    identity = torch.eye(
        size, dtype=module.params_dtype if hasattr(module, "params_dtype") else module.weight.dtype
    )
    product: torch.Tensor = module.cpu_linear(identity, module.weight, None)
    return product.T


def _plain_convolution(packed: torch.Tensor) -> torch.Tensor:
    """Returns the weight [channels, taps] of a convolution that vLLM's CPU kernel keeps in another order."""
    from vllm._custom_ops import causal_conv1d_weight_pack

    plain = torch.empty_like(packed).flatten()
    plain[packed_positions(packed.shape, packed.dtype, causal_conv1d_weight_pack).flatten()] = (
        packed.flatten()
    )
    return plain.view(packed.shape)


@dataclass(frozen=True)
class Fused:
    """A tensor of files whose rows are several projections. A rank has a part per projection; `sizes` are the numbers
    of rows."""

    sizes: tuple[int, ...]
    tp_rank: int
    tp_size: int

    def piece(self, full: torch.Tensor) -> torch.Tensor:
        wholes = full.split([size * self.tp_size for size in self.sizes])
        parts = zip(wholes, self.sizes, strict=True)
        return torch.cat([whole.narrow(0, self.tp_rank * size, size) for whole, size in parts])


@dataclass(frozen=True)
class DecayRates:
    """The rates of a Mamba-2 layer. Files have their logarithms, and vLLM keeps the rates.

    Exponentials on a CPU and on a GPU differ in their last bit. vLLM's loader computes the rates on the layer's device,
    so `piece` does so, too.
    """

    module: nn.Module

    def piece(self, full: torch.Tensor) -> torch.Tensor:
        rank, ranks = _rank_and_size(self.module)
        return -full.chunk(ranks)[rank].to(self.module.get_parameter("A").device).float().exp()


def _split(module: Any, value: torch.Tensor, parts: list[str]) -> Iterable[tuple[Any, torch.Tensor]]:
    """Returns (object with the tensor-parallel rank, value) for each tensor in files."""
    if hasattr(module, "shard_indices"):  # rows beyond the vocabulary are padding
        return [(module, value[: module.shard_indices.num_org_elements])]
    if len(parts) == 1:
        return [(module, value)]
    groups = _groups(module, parts)
    holders = [module if len(g) == 1 else Fused(g, module.tp_rank, module.tp_size) for g in groups]
    return zip(holders, value.split([sum(group) for group in groups]), strict=True)


def _groups(module: Any, parts: list[str]) -> list[tuple[int, ...]]:
    """Returns the number of rows per part of a fused projection on this rank.

    A part with several sizes is fused in files, too, as queries, keys and values of Qwen3.5's gated delta nets are.
    """
    sizes = module.output_partition_sizes
    first = len(sizes) - len(parts) + 1
    return [tuple(sizes[:first]), *((size,) for size in sizes[first:])]


def _rows(module: Any, parts: list[str]) -> list[int]:
    """Returns the number of rows per part of a projection on this rank."""
    return [module.weight.shape[0]] if len(parts) == 1 else [sum(g) for g in _groups(module, parts)]
