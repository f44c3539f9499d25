"""Runs inside vLLM's workers: loads HF tensors into the live model, from a safetensors file, from the memory of a
trainer on the same GPU, or as the trainer sends them (backend "vime").

Owns the checks before and after loading. Refuses: paths outside $VIME_WEIGHT_DIR, weights whose tensors are not those
of the checkpoint. A file is one part and is checked before anything is touched; buckets (vime.engine.buckets) are
checked at the end, and an engine that lacks some must not serve.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from slime.weight_sync.group import GivenUp
from vime.engine.buckets import SentBuckets, SharedBuckets, views
from vime.engine.live_experts import repack_experts
from vime.engine.live_weights import differing_tensors, repack_tied_weights
from vime.engine.plugin import WEIGHT_DIR_VARIABLE
from vime.engine.vllm_versions import ReceivesOnly

logger = logging.getLogger(__name__)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """`path`: the file. `checksums`: HF name -> sha256 of the tensor's bytes; given, every live tensor is compared.

    Or the `tensors` of a bucket: behind `handles`, or of `bytes` bytes and sent by `group`, see vime.engine.buckets.
    `load` False only compares what is live with what is given.
    """

    path: str | None = None
    checksums: dict[str, str] | None = None
    tensors: list[list[Any]] | None = None
    handles: dict[str, list[Any]] | None = None
    bytes: int = 0
    group: dict[str, Any] | None = None
    load: bool = True


class VimeWeightTransferEngine(ReceivesOnly, WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's weight-transfer interface over what trainer and engine share: a file system, a GPU's memory, a group."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.shared = SharedBuckets(self.device)
        self.sent = SentBuckets(self.device, get_tensor_model_parallel_rank())

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        """`loaded`, `compared`: names and shapes that buckets brought so far; `finished`: all of them are in place.
        `store`: of the group that sends them."""
        self.store: str | None = None
        self.loaded: dict[str, list[int]] = {}
        self.compared: dict[str, list[int]] = {}
        self.finished = False

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        """After buckets: all of the checkpoint's tensors must have come, ValueError otherwise, and all of them compared
        if some were, RuntimeError otherwise."""
        self._finish_loading()
        if self.compared and self.compared != self.loaded:
            raise RuntimeError(
                f"all tensors must be compared, got {len(self.compared)} of {len(self.loaded)} "
                "(--check-weight-update-equal)"
            )

    def shutdown(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, on machines without an accelerator too (nothing to synchronise there). A bucket that was
        sent is the engine's own: only what is shared with the trainer must have been read by then."""
        info = self.parse_update_info(update_info)
        self.receive_weights(info)
        if info.group is None and torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load and/or compare one part."""
        if update_info.path is not None:
            self._receive_file(update_info)
        else:
            self._receive_bucket(update_info)

    @torch.no_grad()
    def _receive_bucket(self, update_info: UpdateInfo) -> None:
        """Load, or compare, the tensors of one bucket. RuntimeError when live weights differ from it."""
        if update_info.group is None:
            bucket = self.shared.take(update_info.handles or {})
        else:
            self._begin_again_after(update_info.group["store"])
            try:
                bucket = self.sent.take(update_info.bytes, update_info.group)
            except GivenUp as error:  # no fault of this engine, which is told the same again
                logger.warning("weights are expected again: %s", error)
                return
        tensors = views(bucket, update_info.tensors or [])
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        if update_info.load:
            if not self.loaded:
                initialize_layerwise_reload(self.model)
            if update_info.group is None:
                # vLLM keeps what it is given until a layer is complete, and the trainer fills its bucket again by then.
                tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            self.model.load_weights(tensors.items())
            self.loaded |= shapes
            return
        self._finish_loading()
        wrong = differing_tensors(self.model, tensors, tensors.__getitem__, update=self.loaded)
        if wrong:
            raise RuntimeError(
                f"live weights must equal the trainer's, got {len(wrong)} that differ: {', '.join(wrong[:8])} "
                "(--check-weight-update-equal)"
            )
        self.compared |= shapes

    def _begin_again_after(self, store: str) -> None:
        """Another group than before, within one update, sends all of the weights anew."""
        if self.store not in (None, store):
            if self.loaded and not self.finished:
                finalize_layerwise_reload(self.model, self.model_config)  # vLLM lets go of half layers
            self.loaded, self.compared, self.finished = {}, {}, False
        self.store = store

    def _finish_loading(self) -> None:
        """What vLLM does once the last part is loaded; nothing if that has been done, or a file was loaded."""
        if not self.loaded or self.finished:
            return
        self.finished = True
        finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_weights(self.model)
        repack_experts(self.model)
        self._require_checkpoint(self.loaded, "the update")

    def _require_checkpoint(self, given: dict[str, list[int]], where: str) -> None:
        """ValueError unless the tensors that `where` brings, by name and shape, are the checkpoint's."""
        tied = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
        require_same_tensors(given, checkpoint_shapes(self.model_config.model), tied=tied, where=where)

    @torch.no_grad()
    def _receive_file(self, update_info: UpdateInfo) -> None:
        """Load and/or compare one file.

        Raises ValueError, with the live weights untouched, when the file is outside the weight directory, is not
        what was hashed, or holds other tensors than the checkpoint; RuntimeError when live weights differ from
        the file afterwards: the engine must then not serve.
        """
        path = allowed_path(update_info.path)
        with safe_open(path, framework="pt", device="cpu") as file:
            names = list(file.keys())
            self._require_checkpoint({name: file.get_slice(name).get_shape() for name in names}, "the file")
            if update_info.checksums is not None:
                require_checksums(file, update_info.checksums)
            if update_info.load:
                initialize_layerwise_reload(self.model)
                self.model.load_weights((name, file.get_tensor(name)) for name in names)
                finalize_layerwise_reload(self.model, self.model_config)
                repack_tied_weights(self.model)
                repack_experts(self.model)
            if update_info.checksums is not None:
                wrong = differing_tensors(self.model, names, file.get_tensor)
                if wrong:
                    raise RuntimeError(
                        f"live weights must equal those of {path}, got {len(wrong)} that differ: "
                        f"{', '.join(wrong[:8])} (--check-weight-update-equal)"
                    )


def allowed_path(path: str) -> str:
    """`path` with links resolved; ValueError unless it lies under $VIME_WEIGHT_DIR."""
    root = os.environ.get(WEIGHT_DIR_VARIABLE)
    resolved = os.path.realpath(path)
    if not root or not resolved.startswith(os.path.realpath(root) + os.sep):
        raise ValueError(f"path must lie under {WEIGHT_DIR_VARIABLE} ({root}), got {path}")
    return resolved


def checkpoint_shapes(model_path: str) -> dict[str, list[int]] | None:
    """HF name -> shape of every tensor of the served checkpoint; None when it holds no safetensors files."""
    shapes = {}
    for shard in _shards(model_path):
        with safe_open(shard, framework="pt") as file:
            shapes.update({name: file.get_slice(name).get_shape() for name in file.keys()})  # noqa: SIM118
    return shapes or None


def _shards(model_path: str) -> Iterator[Path]:
    yield from sorted(Path(model_path).glob("*.safetensors"))


def require_same_tensors(
    given: dict[str, list[int]], expected: dict[str, list[int]] | None, *, tied: bool, where: str
) -> None:
    """ValueError unless `given` are exactly the tensors of `expected`; a tied lm_head may be on one side only."""
    optional = {"lm_head.weight"} if tied else set()
    if expected is None:
        return
    for name in (given.keys() ^ expected.keys()) - optional:
        side = "missing from" if name in expected else "not in the checkpoint but in"
        raise ValueError(f"a weight update must hold the checkpoint's tensors, got {name} {side} {where}")
    for name in given.keys() & expected.keys():
        if given[name] != expected[name]:
            raise ValueError(
                f"{name} must have shape {expected[name]} as in the checkpoint, got {given[name]}"
            )


def require_checksums(file: Any, checksums: dict[str, str]) -> None:
    """ValueError unless the tensors of `file` are those of `checksums`, each with the sha256 of its raw bytes."""
    names = set(file.keys())
    wrong = names ^ checksums.keys()
    wrong |= {name for name in names & checksums.keys() if _digest(file.get_tensor(name)) != checksums[name]}
    if wrong:
        raise ValueError(
            f"the weight file must hold what the trainer hashed, got {len(wrong)} tensors that differ: "
            f"{', '.join(sorted(wrong)[:8])} (--check-weight-update-equal)"
        )


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
