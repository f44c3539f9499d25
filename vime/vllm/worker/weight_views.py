"""Copies the tensors of an update straight into the parameters of a live vLLM model.

By a profile on a CPU, vLLM's loader takes about 0.4 ms of Python per tensor. If a model computes with its parameters
alone, each HF tensor corresponds to a view of a parameter. This file finds these views, tests them once, and writes to
them. A model without such views is still loaded by vLLM's loader.

vLLM's loader is also the test of the views. It loads made-up values, and each view must then hold the values of its
tensor. The real weights of an update would show less: many models start with equal norms, and a part of a broadcast is
freed when vLLM has copied it. The test runs before the first update whose tensors are known, and this update replaces
the made-up values. Layers of experts with equal settings have equal views, so the test loads the first and the last of
them. By far the most tensors are experts: Qwen3-30B-A3B has 18,432 of them, and 435 other tensors.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from slime.weight_sync.channel import Part
from vime.vllm.worker.bitwise.layers import METHODS
from vime.vllm.worker.live_experts import alike_experts, keeps_plain_experts
from vime.vllm.worker.live_quantized import Quantized
from vime.vllm.worker.live_weights import cut_shard, holds

# vLLM's own logger prints the messages of loggers below it.
logger = logging.getLogger("vllm.vime.weight_views")

Live = tuple[str, object, Tensor | Quantized]
"""HF name, object with the tensor-parallel rank, value on this rank."""
Shapes = dict[str, list[int]]
_PLAIN_METHODS = (*METHODS, *METHODS.values())
"""Methods of layers that compute with their parameters as they were loaded. On CPUs, vLLM's own methods pack the
parameters (`cpu_linear`)."""
_PERIOD = 1_000_003
"""Number of elements after which made-up values repeat. It is prime, so no number of whole rows is a period."""
_BATCH_BYTES = 1 << 26
"""Maximum bytes of an update's tensors that exist at a time. Some channels allocate new memory for each tensor."""
_DERIVED_BYTES = 1 << 28
"""Maximum bytes that are copied to find out whether the test changes anything but parameters."""


@dataclass(frozen=True)
class LiveModel:
    """The live model of an engine's worker."""

    modules: Sequence[nn.Module]
    """The model, and the draft if updates bring its layers."""
    live: Callable[[Collection[str]], Iterable[Live]]
    """Returns all live values for the HF names of an update."""
    elsewhere: Callable[[Collection[str]], set[str]]
    """Returns the names for which this worker has no value."""
    load: Callable[[Part, Collection[nn.Module]], None]
    """Makes vLLM's loader load a part. It holds all weights except those of the given modules, which keep theirs."""
    dtype: torch.dtype
    device: torch.device


class ViewCache:
    """Keeps the views of an engine's worker over all updates."""

    def __init__(self) -> None:
        self.shapes: Shapes = {}
        """Tensors of the last complete update. The dictionary is empty before the first update."""
        self._views: WeightViews | None = None
        self._addresses: list[int] = []
        self._has_none = False
        self._tests_left = 2
        """Tests that may run out of memory. Before the second update, an engine that shares its GPU has not allocated
        its cache."""

    def arrived(self, shapes: Shapes) -> None:
        """Stores the tensors of an update that is complete."""
        self.shapes = dict(shapes)

    def find(self, model: LiveModel, shapes: Shapes) -> WeightViews | None:
        """Returns the views for an update that brings `shapes`, or None if vLLM's loader must load it.

        The result is None if `shapes` is empty, because the tensors are not known before they arrive, after an update
        that ended half-way in vLLM's loader, and for a model without views. Views are found and tested again when
        parameters have moved. A test leaves made-up weights, which the update must replace.
        """
        halfway = any(parameter.is_meta for each in model.modules for parameter in each.parameters())
        if not shapes or self._has_none or halfway:
            return None
        if self._addresses != _addresses(model.modules):
            try:
                found = find_views(model, shapes)
            except torch.OutOfMemoryError as error:
                # vLLM's loader continues from a model that is loaded in part.
                torch.cuda.empty_cache()
                self._tests_left -= 1
                self._has_none = self._tests_left <= 0
                found = f"the test of the views ran out of memory: {str(error).splitlines()[0]}"
            else:
                self._has_none = isinstance(found, str)
            if isinstance(found, str):
                which = "each" if self._has_none else "this"
                logger.info("vLLM's loader loads %s update of weights: %s", which, found)
                return None
            logger.info("weight updates are copied into %d views", found.count)
            self._views, self._addresses = found, _addresses(model.modules)
        return self._views


class WeightViews:
    """Views into parameters: HF name -> [(object with the tensor-parallel rank, view)]. The list is empty for a tensor
    that this worker leaves out."""

    def __init__(
        self, model: LiveModel, shapes: Shapes, found: Mapping[str, Sequence[tuple[object, Tensor]]]
    ):
        self._shapes, self._found, self._dtype = shapes, found, model.dtype
        self._padding = [rows for each in model.modules for rows in _padding(each) if rows.numel()]
        layers = [layer for each in model.modules for layer in each.modules()]
        self._attention = [layer for layer in layers if isinstance(layer, Attention)]
        self.count = sum(map(len, found.values()))

    def load(self, part: Part) -> None:
        """Copies a part. Raises ValueError for a tensor that the update before did not bring in this shape."""
        for name, shape in part.shapes.items():
            if name not in self._found or shape != self._shapes.get(name, shape):
                raise ValueError(
                    f"a weight update must hold the checkpoint's tensors, got {name} of shape {shape}; "
                    f"updates of this engine have {self._shapes.get(name, 'no such tensor')}"
                )
        views: list[Tensor] = []
        shards: list[Tensor] = []
        waiting = 0
        for name in part.shapes:
            for module, view in self._found[name]:
                views.append(view)
                shards.append(cut_shard(part.read(name), module, view.shape))
                waiting += shards[-1].nbytes
            if waiting > _BATCH_BYTES:
                torch._foreach_copy_(views, shards)
                views, shards, waiting = [], [], 0
        if views:
            torch._foreach_copy_(views, shards)
        logger.debug("copied %d of %d tensors into their views", len(part.shapes), len(self._shapes))

    def finish(self) -> None:
        """Does the work of vLLM's loader other than copying.

        It zeroes the rows beyond the vocabulary, which are lost when an engine sleeps, and makes attention layers renew
        the values that they derive from their parameters.
        """
        for rows in self._padding:
            rows.zero_()
        for layer in self._attention:
            layer.process_weights_after_loading(self._dtype)

    def wrong(self, part: Part) -> list[str]:
        """Returns the names of the part's tensors that their views do not hold."""
        return [
            name
            for name in part.shapes
            for module, view in self._found[name]
            if not holds(view, cut_shard(part.get(name), module, view.shape))
        ]

    def list_names(self, modules: Iterable[nn.Module]) -> set[str]:
        """Returns the names of the tensors that are views of the modules' own parameters."""
        storages = {parameter.data_ptr() for each in modules for parameter in each.parameters(recurse=False)}
        return {
            name
            for name, targets in self._found.items()
            if targets and all(view.untyped_storage().data_ptr() in storages for _, view in targets)
        }


def find_views(model: LiveModel, shapes: Shapes) -> WeightViews | str:
    """Returns the views of an update's tensors after a test with vLLM's loader, or a text that explains why no views
    exist.

    A model has no views if it computes with other values than its parameters, or if the views do not cover all
    parameters. Raises torch.OutOfMemoryError without memory for the largest tensor.
    """
    if (reason := _packs(model.modules)) is not None:
        return reason
    views = _views(model, shapes)
    if isinstance(views, str):
        return views
    weight_views, derived = WeightViews(model, shapes, views), _derived_tensors(model.modules)
    if (size := sum(value.nbytes for value in derived.values())) > _DERIVED_BYTES:
        return f"modules keep {size} bytes outside their parameters"
    kept = alike_experts(model.modules)
    left_out = weight_views.list_names(kept)
    layers = {_expert_layer(name) for name in left_out}
    left_out |= {name for name in model.elsewhere(shapes) if _expert_layer(name) in layers}
    tested = {name: shape for name, shape in shapes.items() if name not in left_out}
    return _why_wrong(model, weight_views, derived, random_weights(tested, model), kept) or weight_views


def _expert_layer(name: str) -> str:
    """Returns the first part of an expert's name, which all experts of its layer have: NAME.12.up_proj.weight."""
    return name.rsplit(".", 3)[0]


def _why_wrong(
    model: LiveModel,
    weight_views: WeightViews,
    derived: dict[str, Tensor],
    trial: Part,
    kept: Collection[nn.Module],
) -> str | None:
    """Makes vLLM's loader load made-up weights, except for the modules in `kept`. Returns a text about a tensor that is
    then not in its view, or None."""
    before = {name: value.clone() for name, value in derived.items()}
    model.load(trial, kept)
    wrong = weight_views.wrong(trial)
    torch.cuda.empty_cache()  # an engine that shares its GPU allocates its cache with the driver
    if wrong:
        return f"vLLM puts {len(wrong)} tensors elsewhere, such as {wrong[0]}"
    after = _derived_tensors(model.modules)
    for name, value in before.items():
        if name not in after or not torch.equal(after[name].to(value), value):
            return f"{name}, which is not a parameter, follows from the weights"
    return None


def random_weights(shapes: Shapes, model: LiveModel) -> Part:
    """Returns all weights as a part of normal values. Each tensor begins at another element of the same series."""
    generator = torch.Generator(model.device).manual_seed(0)
    values = torch.randn(_PERIOD, dtype=model.dtype, device=model.device, generator=generator)
    numbers = {name: number % _PERIOD for number, name in enumerate(shapes)}

    def get(name: str) -> Tensor:
        first = numbers[name]
        end = first + math.prod(shapes[name])
        enough = values if end <= _PERIOD else values.repeat(-(-end // _PERIOD))
        return enough[first:end].view(shapes[name])

    return Part(shapes, get, load=True, compare=False, whole=True)


def _addresses(models: Iterable[nn.Module]) -> list[int]:
    return [parameter.data_ptr() for model in models for parameter in model.parameters()]


def _packs(models: Iterable[nn.Module]) -> str | None:
    """Returns a text about the first module that computes with packed parameters, or None."""
    for model in models:
        for path, module in model.named_modules():
            method = getattr(module, "quant_method", None)
            plain = method is None or type(method) in _PLAIN_METHODS or keeps_plain_experts(module)
            if not plain or hasattr(module, "cpu_linear"):
                return f"{path} packs its weights ({type(method).__name__})"
            known = isinstance(module, (Attention, QuantizeMethodBase))
            if hasattr(module, "process_weights_after_loading") and not known:
                return f"{path} makes values of its weights ({type(module).__name__})"
    return None


def _views(model: LiveModel, shapes: Shapes) -> dict[str, list[tuple[object, Tensor]]] | str:
    """Returns the views that make up all parameters, by HF name, or a text that explains why they do not exist."""
    try:
        return _covering(model, shapes)
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # layers that cannot be read back
        return f"the live model cannot be read: {error}"


def _covering(model: LiveModel, shapes: Shapes) -> dict[str, list[tuple[object, Tensor]]] | str:
    found: dict[str, list[tuple[object, Tensor]]] = {name: [] for name in model.elsewhere(shapes)}
    left = _sizes(model.modules)
    seen = set()
    for name, module, value in model.live(shapes):
        if not isinstance(value, Tensor) or value.untyped_storage().data_ptr() not in left:
            return f"the live value of {name} is not a part of a parameter"
        region = (value.data_ptr(), value.shape, value.stride())
        if region in seen:
            found.setdefault(name, [])  # a tied head, which vLLM leaves out of an update that has both
        elif name in shapes:
            seen.add(region)
            found.setdefault(name, []).append((module, value))
            left[value.untyped_storage().data_ptr()] -= value.numel()
    if missing := shapes.keys() - found.keys():
        return f"{min(missing)} is not live"
    if any(left.values()):
        return "parameters have elements that no tensor of an update brings"
    return found


def _sizes(models: Iterable[nn.Module]) -> dict[int, int]:
    """Maps each parameter storage's address to the number of its parameters' elements without padding."""
    sizes: dict[int, int] = {}
    regions = set()
    every = [(parameter.data, 1) for model in models for parameter in model.parameters()]
    every += [(rows, -1) for model in models for rows in _padding(model)]
    for values, sign in every:
        region = (values.data_ptr(), values.shape)
        if values.numel() and region not in regions:
            regions.add(region)
            address = values.untyped_storage().data_ptr()
            sizes[address] = sizes.get(address, 0) + sign * values.numel()
    return sizes


def _padding(model: nn.Module) -> Iterator[Tensor]:
    """Yields the rows of embeddings beyond the vocabulary."""
    module: Any  # a module of vLLM
    for module in model.modules():
        if hasattr(module, "shard_indices"):
            for parameter in module.parameters(recurse=False):
                yield parameter.data[module.shard_indices.num_org_elements :]


def _derived_tensors(models: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Returns the tensors of modules other than parameters, views of parameters, and caches."""
    storages = _sizes(models)
    return {
        f"{number}.{path}.{name}": value
        for number, model in enumerate(models)
        for path, module in model.named_modules()
        for name, value in (*module.named_buffers(recurse=False), *vars(module).items())
        if isinstance(value, Tensor) and name != "kv_cache" and not value.is_meta
        if value.untyped_storage().data_ptr() not in storages
    }
