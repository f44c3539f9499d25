"""Moves parts of the trainer's state between device and host. A part stays on the host until the trainer needs it.

    residence.bring("parameters", "gradients", "optimizer")     train     residence.release("gradients", "optimizer")

This module owns the host copies: one per part, pinned once. To offload a part, its storages are emptied and later
filled again in place, so every view of a storage (parameters in Megatron's flat buffers, shards, gradient hooks) stays
valid. Do not use a tensor while it is offloaded. `read` returns the values of a parameter from the device or the host.

Megatron's own functions are not used (`MegatronOptimizer.offload_to_cpu`, `_ParamAndGradBuffer.offload_to_cpu`). The
first allocates pageable memory each time and waits for each tensor. The second does not support models without a
gradient buffer or optimizers that are not distributed, and it empties storages before its copy is complete.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from slime.megatron_backend.host_memory import pinned, unpin
from slime.megatron_backend.storages import (
    StoragePiece,
    iter_gradients,
    iter_parameters,
    iter_pieces,
    iter_states,
)
from slime.tracking.timers import Timers


class Residence:
    """Moves `parts` between `device` and host (see PARTS in the cluster section). Other parts stay on the device.

    `models`: first the trained model in its data-parallel wrapper, then a reference model. The optimizer's state must
    exist. `threads` allocate the host copies.
    """

    def __init__(
        self,
        parts: Collection[str],
        device: torch.device,
        timers: Timers,
        models: Iterable[nn.Module],
        optimizer: Any,
        threads: int,
    ) -> None:
        self._device, self._timers, self._optimizer = device, timers, optimizer
        self._threads = threads
        self._pieces: dict[str, list[StoragePiece]] = {}
        self._host: dict[str, Tensor] = {}
        self._away: set[str] = set()
        self._moved = {"offload": 0, "onload": 0}
        seen: set[int] = set()
        # The order matters: without mixed precision, the main weights are the parameters and belong to that part.
        tensors = {
            "parameters": iter_parameters(models := list(models)),
            "gradients": iter_gradients(models),
            "optimizer": iter_states(optimizer),  # step counts stay, because they are read directly
        }
        for part, of_part in tensors.items():
            here = (tensor for tensor in of_part if tensor.device.type == device.type)
            pieces = list(iter_pieces(here, seen))
            if part in parts:
                self._pieces[part] = pieces
        self._owners = {
            piece.storage._cdata: (part, piece) for part, pieces in self._pieces.items() for piece in pieces
        }

    @property
    def away(self) -> frozenset[str]:
        """Returns the parts that are not on the device."""
        return frozenset(self._away)

    def nbytes(self, part: str) -> int:
        """Returns the bytes that are freed on the device when `part` leaves."""
        return sum(piece.nbytes for piece in self._pieces.get(part, ()))

    def release(self, *parts: str, timer: str = "offload") -> None:
        """Offloads parts. Their memory returns to the device, not only to torch's cache. Gradients are lost.

        The time is measured as `timer`, a name that ends in "offload" (for `bring`: in "onload").
        """
        leaving = [part for part in parts if part in self._pieces and part not in self._away]
        if not leaving:
            return
        with self._timers.measure(timer):
            for part in leaving:
                if part == "gradients":
                    self._optimizer.zero_grad()  # the optimizer may hold copies of the gradients in another dtype
                    continue
                host = self._host_copy(part)
                for piece in self._pieces[part]:
                    into = host[piece.offset : piece.offset + piece.nbytes]
                    into.copy_(piece.as_bytes(), non_blocking=True)
                self._moved["offload"] += self.nbytes(part)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            for part in leaving:
                for piece in self._pieces[part]:
                    # A host tensor that was shared with numpy is not resizable and stays.
                    if piece.storage.resizable():
                        piece.storage.resize_(0)
            self._away.update(leaving)
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def bring(self, *parts: str, timer: str = "onload") -> None:
        """Moves parts to the device with their bytes unchanged. Gradients are zero."""
        coming = [part for part in parts if part in self._away]
        if not coming:
            return
        with self._timers.measure(timer):
            for part in coming:
                for piece in self._pieces[part]:
                    if piece.storage.nbytes() == 0:
                        piece.storage.resize_(piece.nbytes)
                    target = piece.as_bytes()
                    if part == "gradients":
                        target.zero_()
                        continue
                    # Later work on the stream sees the copy complete. The host copy does not change until `release`.
                    target.copy_(
                        self._host[part][piece.offset : piece.offset + piece.nbytes], non_blocking=True
                    )
                if part != "gradients":
                    self._moved["onload"] += self.nbytes(part)
                self._away.discard(part)

    def read(self, parameter: Tensor) -> Tensor:
        """Returns the values of a parameter on the device, or in the host copy while it is offloaded. Do not write to
        them."""
        if not self._away:
            return parameter.data
        part, piece = self._owners.get(parameter.untyped_storage()._cdata, (None, None))
        if piece is None or part not in self._away:
            return parameter.data
        start = piece.offset // parameter.element_size() + parameter.storage_offset()
        view = torch.empty(0, dtype=parameter.dtype)
        return view.set_(self._host[part].untyped_storage(), start, parameter.size(), parameter.stride())

    def moved(self) -> dict[str, int]:
        """Returns the bytes moved since the last call, by direction: "offload" and "onload"."""
        moved, self._moved = self._moved, dict.fromkeys(self._moved, 0)
        return moved

    def close(self) -> None:
        """Unpins the host copies. Offloaded parts are lost."""
        for host in self._host.values():
            unpin(host, self._device)
        self._host.clear()

    def _host_copy(self, part: str) -> Tensor:
        """Returns the part's host copy, which is made on first use: pinning tens of GB takes seconds."""
        if part not in self._host:
            size = self._pieces[part][-1].offset + self._pieces[part][-1].nbytes if self._pieces[part] else 0
            self._host[part] = pinned(size, self._device, part, self._threads)
        return self._host[part]


def moving_speed(residences: Iterable[Residence], times: dict[str, float]) -> dict[str, float]:
    """Returns GiB/s of the bytes moved since the last call, from the seconds in `times` (`Timers.flush` of the same
    span)."""
    moved = [residence.moved() for residence in residences]
    out = {}
    for way in ("offload", "onload"):
        size = sum(of_one[way] for of_one in moved)
        seconds = sum(time for name, time in times.items() if name.endswith(f"{way}_time"))
        if size and seconds:
            out[f"perf/{way}_gib_per_s"] = size / 2**30 / seconds
    return out
