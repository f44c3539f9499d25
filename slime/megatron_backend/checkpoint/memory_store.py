"""The state of a trained role on one rank in files of /dev/shm (--recover-from memory), for ranks that start again.

    save: bytes of all storages -> the slot that does not have the newest state; then its record appears
    load: record and bytes of an iteration -> the storages of a model and optimizer of the same shape and ranks

The files are mapped into memory and keep their pages, so a save only copies. Data-parallel ranks with the same bytes
store equal parts of them, and gather them in a load. `slime.checkpoints.memory_files` has the names.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.grad_scaler import MegatronGradScaler
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor, nn

from slime.checkpoints.memory_files import SLOTS, StoredState, find_states, slot_path
from slime.megatron_backend.checkpoint.memory_copies import MemoryCopies, drop_records
from slime.megatron_backend.checkpoint.random_state import rng_state, set_rng_state
from slime.megatron_backend.host_memory import computing
from slime.megatron_backend.storages import StoragePiece, iter_pieces, iter_states
from slime.records.errors import FlagError

_CHUNK_BYTES = 2**28
"""Bytes that data-parallel ranks gather at once."""


@dataclass(frozen=True)
class _Share:
    """A part of a storage. Each rank of `group` (None: this rank alone) stores `size` bytes at `offset` of its
    slot; the last ranks' bytes may be fewer."""

    whole: Tensor
    group: dist.ProcessGroup | None
    size: int
    offset: int

    def mine(self) -> Tensor:
        start = 0 if self.group is None else dist.get_rank(self.group) * self.size
        return self.whole[start : start + self.size]


Record: TypeAlias = dict[str, Any]
"""Values of a state that are not in storages."""
State: TypeAlias = list[tuple[StoragePiece, dist.ProcessGroup | None]]
"""The storages of a state, and the group of the ranks with the same bytes, or None."""


class MemoryStore:
    """The slots of this rank in `folder`, for `state`, and their copies on other nodes. `threads` copy on the host. The
    constructor is collective.

    Removes all earlier states of this node except those of iteration `kept`, which the ranks load.
    """

    def __init__(
        self, folder: Path, state: State, threads: int, timeout_minutes: float, kept: int | None = None
    ) -> None:
        self._folder, self._threads, self._rank = folder, threads, dist.get_rank()
        self._slots: dict[tuple[int, int], Tensor] = {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._size = max(sum(share.size for share in _iter_shares(state)), 1)
        # In threads, because the system zeroes about 2 GB/s. Engines start meanwhile.
        taking = ThreadPoolExecutor(SLOTS, thread_name_prefix="memory-slots")
        self._taken: dict[int, Future[None]] = {
            slot: taking.submit(self._take, self._rank, slot, self._size) for slot in range(SLOTS)
        }
        taking.shutdown(wait=False)
        self._copies = MemoryCopies(folder, self._size, self._open, timeout_minutes)
        if kept is not None:
            self._copies.fetch(kept)
        self._newest: StoredState | None = None
        for one in find_states(folder):
            if one.iteration != kept:
                drop_records(folder, one.rank, one.slot)
            elif one.rank == self._rank:
                self._newest = one

    def save(self, iteration: int, state: State, record: Record) -> None:
        """Stores the present bytes of `state` as `iteration`, with `record`. Waits for the last copies."""
        self._copies.wait()
        slot = 0 if self._newest is None else (self._newest.slot + 1) % SLOTS
        drop_records(self._folder, self._rank, slot)
        with computing(self._threads):
            into = self._open(self._rank, slot, self._size)
            for share in _iter_shares(state):
                mine = share.mine()
                into[share.offset : share.offset + mine.numel()].copy_(mine)
        self._newest = StoredState(iteration, self._rank, slot)
        path = self._newest.record_path(self._folder)
        staged = path.with_name(f".{path.name}")
        torch.save({"sizes": _sizes(state), "record": record}, staged)
        staged.rename(path)
        self._copies.start(self._newest, into)

    def close(self) -> None:
        """Waits for the copies."""
        self._copies.close()

    def load(self, state: State) -> Record:
        """Copies the state `kept` into the storages of `state`, and returns its record. Collective over data-parallel
        ranks."""
        assert self._newest is not None, f"{self._folder} has no state of rank {self._rank}"
        stored = torch.load(self._newest.record_path(self._folder), weights_only=True)  # ok: tensors only
        assert stored["sizes"] == _sizes(state), "the ranks and their state are those of the save"
        with computing(self._threads):
            slot = self._open(self._rank, self._newest.slot, self._size)
            for share in _iter_shares(state):
                mine = share.mine()
                mine.copy_(slot[share.offset : share.offset + mine.numel()])
                if share.group is not None:
                    _gather(share)
        record: Record = stored["record"]
        return record

    def _take(self, rank: int, slot: int, size: int) -> None:
        """Takes all memory of a slot, because a page that cannot be written later would end the process."""
        path = slot_path(self._folder, rank, slot)
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    path.unlink()
                    raise make_space_error(self._folder, size) from error
                raise

    def _open(self, rank: int, slot: int, size: int) -> Tensor:
        """Returns the bytes of a slot."""
        if (rank, slot) not in self._slots:
            if rank == self._rank:
                self._taken[slot].result()
            else:
                self._take(rank, slot, size)
            with slot_path(self._folder, rank, slot).open("r+b") as file:
                pages = mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            self._slots[rank, slot] = torch.frombuffer(pages, dtype=torch.uint8)
        return self._slots[rank, slot]


def make_space_error(folder: Path, size: int) -> FlagError:
    """Returns the error for a folder in memory that has no room for `size` more bytes."""
    disk = os.statvfs(folder)
    return FlagError(
        "--recover-from memory",
        f"have {size / 2**30:.2f} GiB of room in /dev/shm for the trainer's state",
        f"{disk.f_bavail * disk.f_frsize / 2**30:.2f} GiB free in {folder}",
        "enlarge /dev/shm (docker run --shm-size, mount -o remount,size=), or set --recover-from disk",
    )


def _sizes(state: State) -> list[int]:
    return [piece.nbytes for piece, _ in state]


def _iter_shares(state: State) -> Iterator[_Share]:
    offset = 0
    for piece, group in state:
        ranks = 1 if group is None else dist.get_world_size(group)
        for whole in piece.as_bytes().split(_CHUNK_BYTES):
            size = -(-whole.numel() // ranks)
            yield _Share(whole, group, size, offset)
            offset += size


def _gather(share: _Share) -> None:
    """Completes `share.whole` from the ranks' parts."""
    mine = torch.zeros(share.size, dtype=torch.uint8, device=share.whole.device)
    mine[: share.mine().numel()].copy_(share.mine())
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(share.group))]
    dist.all_gather(parts, mine, group=share.group)
    share.whole.copy_(torch.cat(parts)[: share.whole.numel()])


def collect_state(
    models: list[nn.Module], optimizer: MegatronOptimizer, device: torch.device, *, adapters: bool
) -> State:
    """Returns the storages of a trained role. With `adapters`, frozen weights are left out. Data-parallel ranks have
    the same weights."""
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    experts = parallel_state.get_expert_data_parallel_group()
    seen: set[int] = set()
    found: State = []

    def add(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
        for piece in iter_pieces(tensors, seen):
            is_shared = group is not None and group.size() > 1 and piece.storage.device.type == device.type
            found.append((piece, group if is_shared else None))

    for model in models:
        for parameter in model.parameters():
            if parameter.requires_grad or not adapters:
                add([parameter], dense if getattr(parameter, "allreduce", True) else experts)
        add((buffer for _, buffer in model.named_buffers()), None)
    for (
        chained
    ) in optimizer.chained_optimizers:  # fused Adams of other libraries have no moments before a step
        if chained.optimizer is not None and chained.init_state_fn is not None:
            chained.init_state_fn(chained.optimizer, chained.config)
    add(iter_states(optimizer, counts=True), None)
    return found


def make_record(optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler) -> Record:
    """Returns the values of a state that are not in storages."""
    return {
        "scheduler": scheduler.state_dict(),
        "steps": [group.get("step") for group in optimizer.param_groups],
        "scalers": [scaler.state_dict() for scaler in _find_scalers(optimizer)],
        "rng": rng_state(),
    }


def restore_record(
    record: Record, optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler, *, rng: bool
) -> None:
    """Restores the values of `make_record`, with the random generators if `rng` is true."""
    scheduler.load_state_dict(record["scheduler"])
    for group, step in zip(optimizer.param_groups, record["steps"], strict=True):
        if step is not None:
            group["step"] = step
    for scaler, state in zip(_find_scalers(optimizer), record["scalers"], strict=True):
        scaler.load_state_dict(state)
    if rng:
        set_rng_state(record["rng"])


def _find_scalers(optimizer: MegatronOptimizer) -> list[MegatronGradScaler]:
    """Returns the loss scalers of fp16."""
    found = (getattr(chained, "grad_scaler", None) for chained in optimizer.chained_optimizers)
    return [scaler for scaler in found if scaler is not None]
