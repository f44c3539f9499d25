"""A process group for broadcasts in which any rank may die: NCCL between GPUs, gloo between CPUs.

The process that notices a dead rank writes this into a file next to the group's store. This process is the driver,
whose call to an engine failed, or a rank whose connection broke. All waiting ranks poll that file, so no rank waits for
a dead rank until a timeout. An aborted group is not used again. This module owns joining, waiting and aborting.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Protocol, TypedDict, cast

import torch
import torch.distributed as dist
from torch import Tensor

_SHORT_S, _LONG_S = 0.0002, 0.01
"""Shortest and longest time in seconds between two polls of a rank that waits. The time is a fifth of the time waited
so far."""
_MARK_S = 0.1
"""Seconds between two reads of the file that marks the group as given up."""


class GroupInfo(TypedDict):
    """Description of a group: `store`, the path of a new file that all ranks see; the number of ranks; each engine's
    first rank, by its name; and the seconds that a rank waits for the others."""

    store: str
    world: int
    ranks: dict[str, int]
    timeout_s: float


class _Work(Protocol):
    """The used methods of torch's work handle."""

    def is_completed(self) -> bool: ...

    def wait(self) -> object: ...


class _Connected(Protocol):
    """The used methods of torch's groups. In torch's stub their base class has no broadcast."""

    def broadcast(self, tensor: Tensor, root: int, /) -> _Work: ...
    def abort(self) -> None: ...


class GroupAbandoned(RuntimeError):
    """Raised if the group lost a rank, or if a process gave the group up. The weights must be sent again by another
    group."""


def found(directory: Path, ranks: dict[str, int], world: int, timeout_s: float) -> GroupInfo:
    """Returns a new group, which no rank has joined. `ranks` has each engine's first rank by the engine's name."""
    store = str(directory / f"group-{uuid.uuid4().hex}")
    info = GroupInfo(store=store, world=world, ranks=ranks, timeout_s=timeout_s)
    _mark(info).touch()  # a host of a network disk would cache for a long time that the file does not exist
    return info


def give_up(info: GroupInfo) -> None:
    """Releases every rank that waits in the group. Each rank raises GroupAbandoned."""
    _mark(info).write_text("given up", encoding="utf-8")


def is_abandoned(info: GroupInfo) -> bool:
    """Returns whether a process gave the group up."""
    # The file is opened each time, because only then does a network disk query its server.
    return _mark(info).exists() and bool(_mark(info).read_bytes())


def _mark(info: GroupInfo) -> Path:
    return Path(f"{info['store']}-mark")


class TransferGroup:
    """Membership of this process, as rank `rank`, in a group that is separate from torch's default group.

    The constructor returns when all ranks have joined. The constructor and every method raise GroupAbandoned if a
    process has abandoned the group. They abandon it after a broken connection, or after `timeout_s` of waiting.
    """

    def __init__(self, info: GroupInfo, rank: int, device: torch.device) -> None:
        self._info = info
        self._group: _Connected | None = None
        self._under_way: deque[tuple[_Work, Tensor]] = deque()
        try:
            self._wait(lambda: True)
            store = dist.FileStore(info["store"], info["world"])
            store.set(f"here-{rank}", "")
            ranks = [f"here-{other}" for other in range(info["world"])]
            self._wait(lambda: store.check(ranks))
            # A connection attempt cannot be cancelled: if a rank dies meanwhile, the thread stays behind.
            joining: Future[_Connected] = Future()
            threading.Thread(target=_join, args=(joining, store, info, rank, device), daemon=True).start()
            try:
                self._wait(joining.done)
            finally:
                joining.cancel()  # no effect on a finished future
            self._group = joining.result()
        except RuntimeError as error:
            raise self._abandon(error) from error

    def start(self, bucket: Tensor, source: int = 0) -> None:
        """Starts to send (rank `source`) or receive `bucket`. A GPU does so after the work on the current stream."""
        assert self._group is not None, "a closed group is not used again"
        try:
            self._under_way.append((self._group.broadcast(bucket, source), bucket))
        except RuntimeError as error:
            raise self._abandon(error) from error

    def settle(self, limit: int = 0) -> None:
        """Waits until at most `limit` broadcasts are running. They end in the order in which they began."""
        while len(self._under_way) > limit:
            work, _ = self._under_way[0]
            try:
                self._wait(work.is_completed)
                work.wait()  # raises the broadcast's error
            except RuntimeError as error:
                raise self._abandon(error) from error
            self._under_way.popleft()

    def close(self) -> None:
        """Leaves the group. A thread frees its communicator and buffers, because torch does not free them."""
        left: list[object] = [self._group, *self._under_way]
        self._group = None
        self._under_way.clear()
        threading.Thread(target=_dispose, args=(left,), daemon=True).start()

    def _wait(self, done: Callable[[], bool]) -> None:
        began = looked = time.monotonic()
        if is_abandoned(self._info):
            raise GroupAbandoned("the group was given up")
        while not done():
            now = time.monotonic()
            if now - looked > _MARK_S:
                looked = now
                if is_abandoned(self._info):
                    raise GroupAbandoned("the group was given up while this rank waited")
            if now - began > self._info["timeout_s"]:
                raise GroupAbandoned(
                    f"the others must come within {self._info['timeout_s']:.0f} s; they did not"
                )
            time.sleep(min(max(_SHORT_S, (now - began) / 5), _LONG_S))

    def _abandon(self, reason: RuntimeError) -> GroupAbandoned:
        """Gives the group up for all ranks, and frees it in a thread: gloo waits for dead ranks before it ends."""
        give_up(self._info)
        self.close()
        return reason if isinstance(reason, GroupAbandoned) else GroupAbandoned(f"the group broke: {reason}")


def _join(
    joining: Future[_Connected],
    store: dist.FileStore,
    info: GroupInfo,
    rank: int,
    device: torch.device,
) -> None:
    """Connects torch's group and stores it as the result of `joining`. NCCL connects at its first broadcast."""
    timeout = timedelta(seconds=info["timeout_s"])
    try:
        if device.type == "cuda":
            group = _nccl(store, rank, info["world"], timeout)
        else:
            group = cast(_Connected, dist.ProcessGroupGloo(store, rank, info["world"], timeout))
        group.broadcast(torch.zeros(1, device=device), 0).wait()
    except BaseException as error:  # the border of this thread: `joining.result()` raises it
        if joining.set_running_or_notify_cancel():
            joining.set_exception(error)
    else:
        if joining.set_running_or_notify_cancel():
            joining.set_result(group)
        else:  # no thread waits for the group any more
            _dispose([group])


def _nccl(store: dist.FileStore, rank: int, world: int, timeout: timedelta) -> _Connected:
    """Returns a group without torch's watchdog, which would end the process when a peer is lost. With blocking waits
    torch starts no watchdog (it reads the variable when it creates a group). This module calls `wait` on finished work
    only."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return cast(_Connected, dist.ProcessGroupNCCL(store, rank, world, options))
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _dispose(left: list[object]) -> None:
    """Ends the kernels of an NCCL group that wait for dead ranks, then frees the memory that they use."""
    group = cast(_Connected | None, left[0])
    if group is not None:
        with contextlib.suppress(RuntimeError):  # in some versions of torch gloo has no abort
            group.abort()
    left.clear()
