"""Loads the weights that slime's weight channels receive into the live model (backend "vime"). Runs inside vLLM's
workers.

Owns loading, and the checks before and after it. The channel receives the parts (slime.weight_sync). Refuses weights
whose tensors are not those of the checkpoint. A part that holds all weights is checked before anything is loaded. Other
parts are checked when the update ends; an engine that lacks some weights must not serve.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from slime.protocols import WeightSet
from slime.weight_sync.channel import Part, Receiver, Worker
from slime.weight_sync.delta.loader import DeltaLoader
from slime.weight_sync.registry import CHANNELS
from vime.vllm.versions import ReceivesOnly
from vime.vllm.worker import bitwise
from vime.vllm.worker.adapter_loader import AdapterLoader
from vime.vllm.worker.draft import differing_draft_tensors, live_draft_tensors
from vime.vllm.worker.live_checksums import checksums, has_scales
from vime.vllm.worker.live_experts import exclude_from_reload, repack_experts, stacks_experts
from vime.vllm.worker.live_weights import (
    differing_tensors,
    live_tensors,
    names_elsewhere,
    repack_tied_weights,
)
from vime.vllm.worker.settings import EngineSettings
from vime.vllm.worker.update_tensors import CheckpointTensors
from vime.vllm.worker.weight_views import Live, LiveModel, ViewCache, WeightViews


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Empty record: this backend exchanges nothing before an update."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One part of an update, as `slime.protocols.WeightUpdate.message` describes it."""

    channel: str
    info: dict[str, object]
    weights: dict[str, object] | None = None
    """The `slime.protocols.WeightSet`. None means full weights."""


class VimeWeightTransferEngine(ReceivesOnly, WeightTransferEngine[InitInfo, UpdateInfo]):
    """Implements vLLM's weight-transfer interface with slime's weight channels."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.worker = Worker.here(self.device, get_tensor_model_parallel_rank())
        self.receivers: dict[str, Receiver] = {}
        self.draft: Any = None  # the model that the engine speculates with; RunWorker sets it
        self.known = ViewCache()
        # views to which this update is copied; None: vLLM's loader loads it
        self.views: WeightViews | None = None
        self._is_checked = False

    @cached_property
    def tensors(self) -> CheckpointTensors:
        """Returns the tensors of the engine's checkpoint."""
        tied = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
        return CheckpointTensors(self.model_config.model, tied=tied or self._has_own_head)

    @property
    def _has_own_head(self) -> bool:
        """Returns True if the trainer's head is tied and vLLM loaded a head, because the checkpoint's files repeat
        it."""
        return getattr(self.model_config, "word_embeddings_untied_by_checkpoint", False)

    @property
    def brings_adapter(self) -> bool:
        """Returns True if the running update brought an adapter, and False before the first update starts."""
        return hasattr(self, "adapter") and self.adapter.brings

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        """Starts an update and resets its state.

        `before` has checksums of live values, while the update is loaded a second time. `loaded` and `compared` have
        the names and shapes of the tensors that parts brought so far. `finished` means that vLLM has processed all
        loaded tensors. `series` identifies the parts that belong together, see `slime.weight_sync.channel.Part`.
        """
        if not self._is_checked:
            bitwise.require(self.model, EngineSettings.from_config(self.vllm_config).bitwise)
            self._is_checked = True
        self.series: str | None = None
        self.before: dict[str, int] | None = None
        self.loaded: dict[str, list[int]] = {}
        self.compared: dict[str, list[int]] = {}
        self.finished = False
        self.adapter = AdapterLoader(self.model, self.device)
        self.delta = DeltaLoader(self.worker)

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        """Finishes an update that came in several parts.

        Raises ValueError unless all of the checkpoint's tensors came. If any tensor was compared, raises RuntimeError
        unless all were compared.
        """
        self.adapter.finish()
        self.delta.finish()
        self._finish_loading()
        self._finish_comparison()
        if self.compared and self.compared != self.loaded:
            raise RuntimeError(
                f"all tensors must be compared, got {len(self.compared)} of {len(self.loaded)} "
                "(--check-weight-update-equal)"
            )

    def shutdown(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Receives one part. vLLM's base class would synchronise an accelerator, which a machine with CPUs only does
        not have."""
        self.receive_weights(self.parse_update_info(update_info))

    @torch.no_grad()
    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Loads one part, compares the live weights with it, or both.

        For all weights in one part, raises ValueError before anything is loaded if the tensors are not the
        checkpoint's, or not the trainer's. Raises RuntimeError when live weights differ from the part: the engine must
        then not serve.
        """
        weights = WeightSet.of(update_info.weights)
        with self._receiver(update_info.channel).receive(update_info.info) as part:
            if part is None:
                return  # the same weights were sent again
            if weights.kind == "adapter":
                self.adapter.take(part, weights)
            elif weights.kind == "delta":
                with self.delta.whole(part, weights) as whole:
                    if whole is not None:
                        self._take_all(whole)
            elif part.whole:
                self._take_all(part)
                self.delta.keep(part, weights)
            else:
                self._take(part)
            if part.borrowed and torch.accelerator.is_available():
                torch.accelerator.synchronize()

    def _receiver(self, channel: str) -> Receiver:
        if channel not in self.receivers:
            if channel not in CHANNELS:
                raise ValueError(f"a part must come by one of {', '.join(CHANNELS)}, got {channel}")
            self.receivers[channel] = CHANNELS[channel].load().on_engine(self.worker)
        return self.receivers[channel]

    def _take_all(self, part: Part) -> None:
        self.tensors.require(part.shapes, "the file")
        part.verify()
        if part.load:
            self._begin_loading(part)
            self._load(part)
            self._complete_loading()
            self.known.arrived(part.shapes)
        if part.compare:
            self._compare(part, part.shapes)

    def _take(self, part: Part) -> None:
        part.verify()
        self._begin_again_after(part.series)
        if part.load:
            if not self.loaded:
                self._begin_loading(part)
            self._load(part)
            self.loaded |= part.shapes
        if part.compare:
            self._finish_loading()
            self._compare(part, self.loaded)
            self.compared |= part.shapes

    def _begin_loading(self, first: Part) -> None:
        """Chooses how the update is loaded. The first update can be copied if its tensors are known before they
        arrive."""
        shapes = self.known.shapes or (first.shapes if first.whole else self.tensors.every_update())
        self.views = self.known.find(self._live_model(shapes), shapes)
        if self.views is None:
            self._begin_reload()

    def _models(self) -> list[nn.Module]:
        return [self.model] if self.draft is None else [self.model, self.draft]

    def _live_model(self, update: Collection[str]) -> LiveModel:
        models = [self.model]
        if self.draft is not None and self.tensors.predicted_names(update):
            models.append(self.draft)
        dtype = cast(torch.dtype, self.model_config.dtype)  # vLLM has resolved it
        return LiveModel(models, self._live, self._elsewhere, self._reload, dtype, self.device)

    def _live(self, update: Collection[str]) -> Iterator[Live]:
        predicted = self.tensors.predicted_names(update)
        yield from live_tensors(self.model, set(update) - predicted)
        if self.draft is not None and predicted:
            yield from live_draft_tensors(self.draft, self.model, predicted)

    def _elsewhere(self, update: Collection[str]) -> set[str]:
        predicted = self.tensors.predicted_names(update)
        return names_elsewhere(self.model, update) | (predicted if self.draft is None else set())

    def _reload(self, part: Part, kept: Collection[nn.Module]) -> None:
        """Loads all weights with vLLM's loader, except those of the modules in `kept`."""
        self.views = None
        self._begin_reload(kept)
        self._load(part)
        self._complete_loading()

    def _begin_reload(self, kept: Collection[nn.Module] = ()) -> None:
        name_loaders(self.model)
        for model in self._models():
            initialize_layerwise_reload(model)
            exclude_from_reload(model, kept)

    def _load(self, part: Part) -> None:
        if self.views is not None:
            self.views.load(part)
            return
        model: Any = self.model  # vLLM's models have the method, their base class does not
        predicted = self.tensors.predicted_names(part.shapes)
        stacked = stacks_experts(model)
        tensors: Iterator[tuple[str, Tensor]]
        tensors = ((name, part.get(name)) for name in part.shapes if name not in predicted)
        tensors = self.tensors.with_head(tensors) if self._has_own_head else tensors
        # vLLM zeroes such a bias on all ranks but the first, and ranks may share the tensor
        model.load_weights((n, x.clone() if stacked and n.endswith("_bias") else x) for n, x in tensors)
        if self.draft is not None and predicted:
            self.draft.load_weights((name, part.get(name)) for name in part.shapes if name in predicted)

    def _finalize(self) -> None:
        finalize: Callable[..., None] = finalize_layerwise_reload  # untyped in vLLM
        finalize(self.model, self.model_config)
        if self.draft is not None:  # after the model, which holds the embedding and head of both
            finalize(self.draft, self.model_config)

    def _compare(self, part: Part, update: dict[str, list[int]]) -> None:
        """Raises RuntimeError when live weights differ from the part. `update` has every part's tensors. Weights in the
        scheme of a quantised checkpoint are compared when all parts have come."""
        if has_scales(update):
            if self.before is None:
                self.views, self.before = None, checksums(self._models())
                self._begin_reload()
            self._load(part)
            if part.whole:
                self._finish_comparison()
            return
        predicted = self.tensors.predicted_names(update)
        mine = [name for name in part.shapes if name not in predicted]
        wrong = differing_tensors(self.model, mine, part.read, update=update.keys() - predicted)
        if self.draft is not None and (ahead := predicted & part.shapes.keys()):
            wrong += differing_draft_tensors(self.draft, self.model, ahead, part.read, predicted)
        _require_none(wrong, part.origin)

    def _finish_comparison(self) -> None:
        """Raises RuntimeError if the second load of an update has changed a live value."""
        if self.before is None:
            return
        before, self.before = self.before, None
        self._complete_loading()
        after = checksums(self._models())
        _require_none([name for name, value in before.items() if after.get(name) != value], "the trainer's")

    def _begin_again_after(self, series: str | None) -> None:
        """Resets the state when parts of another series arrive, because they bring all weights again."""
        if self.series not in (None, series):
            loads = self.loaded and not self.finished and self.views is None
            if loads or self.before is not None:
                self._finalize()  # vLLM drops layers that arrived incomplete
            self.loaded, self.compared, self.finished, self.before = {}, {}, False, None
        self.series = series

    def _finish_loading(self) -> None:
        """Finishes the loaded parts once. Does nothing after a part with all weights, which is already finished."""
        if not self.loaded or self.finished:
            return
        self.finished = True
        self._complete_loading()
        self.tensors.require(self.loaded, "the update")
        self.known.arrived(self.loaded)

    def _complete_loading(self) -> None:
        """Does vLLM's work after loading, and the work that vLLM leaves out.

        A model that is loaded through views has no packed copies of tied weights or experts to renew.
        """
        if self.views is not None:
            self.views.finish()
            return
        self._finalize()
        repack_tied_weights(self.model)
        repack_experts(self.model)
        if self.draft is not None:
            repack_experts(self.draft)


def _require_none(wrong: Sequence[str], origin: str) -> None:
    """Raises RuntimeError with the names of live values that differ."""
    if wrong:
        raise RuntimeError(
            f"live weights must equal {origin}, got {len(wrong)} that differ: {', '.join(wrong[:8])} "
            "(--check-weight-update-equal)"
        )


def name_loaders(model: nn.Module) -> None:
    """Gives each loader of a parameter a name, because vLLM's layerwise reload reads it. The loaders of MiniMax-M2's
    norms of queries and keys have no name."""
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        if isinstance(loader, partial) and not hasattr(loader, "__name__"):
            loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]
