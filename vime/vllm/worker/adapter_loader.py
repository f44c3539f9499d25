"""Copies the adapter of an update into its slot of vLLM, in place, and compares both. Runs inside vLLM's workers.

An adapter arrives in one part or in several. It is copied when all parts have arrived, so the engine never holds a part
of an adapter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from slime.protocols import WeightSet
from slime.weight_sync.channel import Part
from vime.vllm.versions import renames_alone
from vime.vllm.worker.adapter import adapter_number

if TYPE_CHECKING:
    from vllm.lora.layers import BaseLayerWithLoRA
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.model_executor.models.utils import WeightsMapper


class AdapterLoader:
    """Collects the parts of an update that brings an adapter alone."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model, self._device = model, device
        self._begin()

    def _begin(self) -> None:
        self._series: str | None = None
        self._weights: WeightSet | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._compared: set[str] = set()
        self._installed = False

    @property
    def manager(self) -> LoRAModelManager:
        """Returns vLLM's manager of adapters. Raises ValueError for an engine that was started without a slot."""
        manager: LoRAModelManager | None = getattr(self._model, "lora_manager", None)
        if manager is None:
            raise ValueError(
                "an engine that gets adapters must be started with --enable-lora, got one without; a run starts its "
                "engines so, and `vime serve engine` does with the same --lora-rank"
            )
        return manager

    def take(self, part: Part, weights: WeightSet) -> None:
        """Keeps a part, or compares the live adapter with it. Raises RuntimeError if they differ."""
        part.verify()
        if self._series not in (None, part.series):
            self._begin()  # the sender repeats all parts
        self._series, self._weights = part.series, weights
        if part.load:
            self._tensors |= {name: part.get(name).to(self._device, copy=True) for name in part.shapes}
            if part.whole:
                self._install()
        if part.compare:
            self._install()
            wrong = differing(self.manager, self._model, {n: part.get(n) for n in part.shapes}, weights)
            if wrong:
                raise RuntimeError(
                    f"the live adapter must equal {part.origin}, got {len(wrong)} tensors that differ: "
                    f"{', '.join(wrong[:8])} (--check-weight-update-equal)"
                )
            self._compared |= part.shapes.keys()

    @property
    def brings(self) -> bool:
        """Returns True if this update brought an adapter."""
        return bool(self._tensors)

    def finish(self) -> None:
        """Makes the complete adapter live. If any tensor was compared, raises RuntimeError unless all tensors were."""
        self._install()
        if self._compared and self._tensors and self._compared != self._tensors.keys():
            raise RuntimeError(
                f"all tensors must be compared, got {len(self._compared)} of {len(self._tensors)} "
                "(--check-weight-update-equal)"
            )

    def _install(self) -> None:
        if self._installed or not self._tensors:
            return
        assert self._weights is not None
        replace_adapter(self.manager, self._model, self._tensors, self._weights, self._device)
        self._installed = True


def _mapper(model: Any) -> WeightsMapper | None:
    mapper: WeightsMapper | None = getattr(model, "hf_to_vllm_mapper", None)
    return None if mapper is None else renames_alone(mapper)


def _matrices(
    tensors: dict[str, torch.Tensor], model: Any
) -> dict[str, dict[bool, tuple[str, torch.Tensor]]]:
    """Maps vLLM's name of a module to {True for A, False for B: (PEFT's name, matrix)}."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    found: dict[str, dict[bool, tuple[str, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        module, is_a = parse_fine_tuned_lora_name(name, _mapper(model))
        found.setdefault(module, {})[is_a] = name, tensor
    return found


def replace_adapter(
    manager: LoRAModelManager,
    model: Any,
    tensors: dict[str, torch.Tensor],
    weights: WeightSet,
    device: torch.device,
) -> None:
    """Replaces the adapter of this name.

    Raises ValueError for a matrix without its pair, for a module that the engine's model does not have, and for a rank
    above its slot's rank. Raises ValueError for a new name if no slot is free.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    number, there = adapter_number(weights.name), manager.list_adapters()
    if number not in there and len(there) == manager.lora_slots:
        raise ValueError(
            f"--vllm-max-loras must be at least {len(there) + 1} for an engine that gets another adapter, got "
            f"{manager.lora_slots} and {weights.name}; start the engine with more, or again without the others"
        )
    known = {part for name in manager.modules for part in manager.packed_modules.get(name, [name])}
    for module, pair in _matrices(tensors, model).items():
        if len(pair) != 2 or module not in known:
            why = (
                "without its pair" if len(pair) != 2 else "of a module that the engine's model does not have"
            )
            raise ValueError(
                f"an adapter must have an A and a B for modules of the model, got {next(iter(pair.values()))[0]} {why}"
            )
    helper = PEFTHelper.from_dict(dict(weights.settings))
    helper.validate_legal(manager.lora_config)
    loaded = LoRAModel.from_lora_tensors(
        number,
        tensors,
        helper,
        device=str(device),
        dtype=manager.lora_config.lora_dtype,  # type: ignore[arg-type]  # vLLM has resolved it
        model_vocab_size=manager.vocab_size,
        weights_mapper=_mapper(model),
    )
    manager.remove_adapter(number)
    manager.add_adapter(loaded)
    manager.activate_adapter(number)


def differing(
    manager: LoRAModelManager, model: Any, tensors: dict[str, torch.Tensor], weights: WeightSet
) -> list[str]:
    """Returns PEFT's names of the matrices whose live values on this rank differ from `tensors`, sorted.

    Raises ValueError for a matrix that is not live.
    """
    matrices = _matrices(tensors, model)
    scale = weights.settings["lora_alpha"] / weights.settings["r"]
    slot = manager.lora_index_to_id.index(adapter_number(weights.name))
    wrong, seen = [], set()
    for name, module in manager.modules.items():
        parts = manager.packed_modules.get(name, [name])
        if not any(part in matrices for part in parts):
            continue
        if not hasattr(module, "lora_a_stacked") or "MoE" in type(module).__name__:
            raise ValueError(
                "--check-weight-update-equal must be left out with adapters of experts, got one for "
                f"{name}; vLLM's slots of experts cannot be read back"
            )
        for at, part in enumerate(parts):
            for is_a, (peft_name, tensor) in matrices.get(part, {}).items():
                seen.add(peft_name)
                live = (module.lora_a_stacked if is_a else module.lora_b_stacked)[at][slot, 0]
                wanted = tensor.to(live.device, live.dtype)
                wanted = _own(module, wanted if is_a else wanted * scale, at, len(parts), is_a=is_a)
                if not torch.equal(live[: wanted.shape[0], : wanted.shape[1]], wanted):
                    wrong.append(peft_name)
    if unseen := tensors.keys() - seen:
        raise ValueError(f"every matrix of an update must be live to be compared, got {sorted(unseen)[:8]}")
    return sorted(wrong)


def _own(module: BaseLayerWithLoRA, whole: torch.Tensor, at: int, parts: int, *, is_a: bool) -> torch.Tensor:
    """Returns the part of a matrix that this tensor-parallel rank holds in its slot."""
    if getattr(module, "tp_size", 1) == 1:
        return whole
    cut: Any = module.slice_lora_a if is_a else module.slice_lora_b
    if parts == 1:
        own: torch.Tensor = cut(whole)
        return own
    listed: list[torch.Tensor | None] = [None] * parts
    listed[at] = whole
    shards: list[torch.Tensor] = cut(listed)
    return shards[at]
