"""A process group for broadcasts from rank 0, of which any rank may die: NCCL between GPUs, gloo between CPUs.

Whoever learns that a rank is gone says so in a file beside the group's store: the driver, whose call to it fails, or a
rank whose connection broke. All who wait look at that file, so that nobody waits for the dead until a timeout. A
group that was given up is not used again. Owns joining, waiting and giving up. What group it is, `info` tells:
{"store": path of a new file that all see, "world": number of ranks, "ranks": see `found`, "timeout_s"}.
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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_SHORT_S, _LONG_S = 0.0002, 0.01
"""Between two looks at what is waited for: a fifth of the time so far, within these bounds."""
_MARK_S = 0.1
"""Between two looks at the file that says whether the group is given up."""


class GivenUp(RuntimeError):
    """The group lacks a rank, or somebody said so: what it carried is to be sent again, by another group."""


def found(directory: Path, ranks: dict[str, int], world: int, timeout_s: float) -> dict[str, Any]:
    """`info` of a group that nobody has joined yet. `ranks`: the first one of each engine, by its name."""
    info = {"store": str(directory / f"group-{uuid.uuid4().hex}"), "world": world, "ranks": ranks}
    _mark(info).touch()  # hosts that share a network disk would remember for long that it was not there
    return {**info, "timeout_s": timeout_s}


def give_up(info: dict[str, Any]) -> None:
    _mark(info).write_text("given up")


def is_given_up(info: dict[str, Any]) -> bool:
    # Opened each time, upon which a network disk asks its server.
    return _mark(info).exists() and bool(_mark(info).read_bytes())


def _mark(info: dict[str, Any]) -> Path:
    return Path(f"{info['store']}-mark")


class Group:
    """This process as rank `rank`. Apart from torch's default group, if there is one.

    The constructor returns when all ranks are there. It and every method raise GivenUp when the group is given up, also
    for a reason of this rank's own: a broken connection, or `timeout_s` of waiting.
    """

    def __init__(self, info: dict[str, Any], rank: int, device: torch.device) -> None:
        self._info = info
        self._group: Any = None
        self._under_way: deque[tuple[Any, Tensor]] = deque()
        try:
            self._wait(lambda: True)
            store = dist.FileStore(info["store"], info["world"])
            store.set(f"here-{rank}", "")
            ranks = [f"here-{other}" for other in range(info["world"])]
            self._wait(lambda: store.check(ranks))
            # Connecting cannot be called off: if a rank dies just now, the thread is left behind.
            joining: Future[Any] = Future()
            threading.Thread(target=_join, args=(joining, store, info, rank, device), daemon=True).start()
            try:
                self._wait(joining.done)
            finally:
                joining.cancel()  # no effect on one that is done
            self._group = joining.result()
        except RuntimeError as error:
            raise self._abandon(error) from error

    def start(self, bucket: Tensor) -> None:
        """Begin to send (rank 0) or receive `bucket`. On a GPU, after what its current stream has been given so far."""
        try:
            self._under_way.append((self._group.broadcast(bucket, 0), bucket))
        except RuntimeError as error:
            raise self._abandon(error) from error

    def settle(self, limit: int = 0) -> None:
        """Wait until at most `limit` broadcasts are under way; the first ones end first."""
        while len(self._under_way) > limit:
            work, _ = self._under_way[0]
            try:
                self._wait(work.is_completed)
                work.wait()  # raises what went wrong
            except RuntimeError as error:
                raise self._abandon(error) from error
            self._under_way.popleft()

    def close(self) -> None:
        """Leave the group for good: its communicator and buffers do not go by themselves. Another one may follow."""
        left, self._group = [self._group, *self._under_way], None
        self._under_way.clear()
        threading.Thread(target=_dispose, args=(left,), daemon=True).start()

    def _wait(self, done: Callable[[], bool]) -> None:
        began = looked = time.monotonic()
        if is_given_up(self._info):
            raise GivenUp("the group was given up")
        while not done():
            now = time.monotonic()
            if now - looked > _MARK_S:
                looked = now
                if is_given_up(self._info):
                    raise GivenUp("the group was given up while this rank waited")
            if now - began > self._info["timeout_s"]:
                raise GivenUp(f"the others must come within {self._info['timeout_s']:.0f} s; they did not")
            time.sleep(min(max(_SHORT_S, (now - began) / 5), _LONG_S))

    def _abandon(self, reason: RuntimeError) -> GivenUp:
        """Tell the others, and leave what torch may still use to a thread: gloo waits for the dead before it goes."""
        give_up(self._info)
        self.close()
        return reason if isinstance(reason, GivenUp) else GivenUp(f"the group broke: {reason}")


def _join(
    joining: Future[Any], store: dist.FileStore, info: dict[str, Any], rank: int, device: torch.device
) -> None:
    """The result: torch's group, connected. NCCL connects with its first broadcast."""
    timeout = timedelta(seconds=info["timeout_s"])
    try:
        if device.type == "cuda":
            group = _nccl(store, rank, info["world"], timeout)
        else:
            group = dist.ProcessGroupGloo(store, rank, info["world"], timeout)
        group.broadcast(torch.zeros(1, device=device), 0).wait()
    except BaseException as error:  # the border of this thread: raised where the result is asked for
        if joining.set_running_or_notify_cancel():
            joining.set_exception(error)
    else:
        if joining.set_running_or_notify_cancel():
            joining.set_result(group)
        else:  # nobody waits any more
            _dispose([group])


def _nccl(store: dist.FileStore, rank: int, world: int, timeout: timedelta) -> Any:
    """Without torch's watchdog, which ends the process when a peer is lost. A blocking wait needs none (torch reads the
    variable when a group is made), and here nobody waits before the work is done."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, world, options)
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _dispose(left: list[Any]) -> None:
    """End the kernels of an NCCL group that wait for the dead; memory that they use is let go after that."""
    if left[0] is not None:
        with contextlib.suppress(RuntimeError):  # gloo's of some torch versions has no abort
            left[0].abort()
    left.clear()
