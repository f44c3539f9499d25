"""Detects that trainer ranks cannot continue: a dead process, a broken or late collective, or a process that does not
answer.

Other errors of a rank, such as values that are not finite, would occur again after a restart, so they stay errors.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil
import ray
from ray.exceptions import RayActorError, RayError

from slime.cluster.calls import DIED, Actor, ActorError, Ref
from slime.cluster.faults.node_calls import call_on_nodes
from slime.cluster.watchdog import is_running
from slime.protocols import TrainerLost

_BROKEN = re.compile(
    r"/gloo/|\bNCCL\b|\bnccl[A-Z]\w+Error|Dist(Backend|Network|Store)Error|"
    r"Connection (closed|reset) by (peer|remote)|uncorrectable ECC|NVLink error"
)
"""Matches the text of an error of a collective, or of a broken device."""
_MEMORY = re.compile(r"out of memory|OutOfMemory|running low on memory", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")
_ASK_EVERY_S = 2.0
_START_S = 120.0
"""Seconds within which a process must answer for the first time, unless the limit is longer."""


class RankLost(ActorError, TrainerLost):
    """Raised if a trainer rank cannot continue. The message names the rank."""

    @property
    def cause(self) -> str:  # type: ignore[override]
        """Returns the reason without numbers, such as ports and process ids."""
        return _NUMBER.sub("#", self.reason)

    @classmethod
    def from_error(cls, error: ActorError) -> RankLost:
        """Returns the same error as a loss."""
        return cls(error.name, error.reason, error.log, error.details, died=error.died)


def is_loss(error: ActorError) -> bool:
    """Returns True if new ranks may succeed: the process died, or a collective failed. An error of memory is no loss,
    because it would come again."""
    text = error.details if error.reason == DIED else f"{error.reason}\n{error.details}"
    if _MEMORY.search(text):
        return False
    return error.died or bool(_BROKEN.search(text))


class AnswerWatch:
    """Asks each rank every two seconds for an answer, from its first answer on. Calls of several threads are
    allowed."""

    def __init__(self, actors: Mapping[str, Actor], limit_s: float) -> None:
        self._actors, self._limit_s = actors, limit_s
        self._asked: dict[str, tuple[Ref, float]] = {}
        self._first: dict[str, Ref] = {name: actor.answer.remote() for name, actor in actors.items()}
        """First questions; a rank answers when its process exists."""
        self._began = time.monotonic()
        self._lock = threading.Lock()

    def find_silent(self) -> str | None:
        """Returns the first rank that has not answered for the limit, or None."""
        now = time.monotonic()
        with self._lock:
            for name, actor in self._actors.items():
                ref, asked_s = self._asked.get(name, (self._first[name], self._began))
                limit_s = self._limit_s if name in self._asked else max(self._limit_s, _START_S)
                if not ray.wait([ref], timeout=0)[0]:
                    if now - asked_s > limit_s:
                        return name
                elif now - asked_s >= _ASK_EVERY_S:
                    self._asked[name] = actor.answer.remote(), now
        return None

    def end(self, limit_s: float) -> None:
        """Kills the processes of all ranks that have started, and returns when they have ended. Ray's own kill does not
        reach a process that a signal has stopped. Raises RuntimeError after the limit."""
        by_node: dict[str, list[int]] = {}
        asked = list(self._first.values())
        ended, _ = ray.wait(asked, num_returns=len(asked), timeout=0)
        for ref in ended:
            with contextlib.suppress(RayError):  # the rank died before it could answer
                node, pid = ray.get(ref)
                by_node.setdefault(node, []).append(pid)
        call_on_nodes(
            {node: partial(end_processes, pids, limit_s) for node, pids in by_node.items()}, limit_s
        )


def end_processes(pids: Sequence[int], limit_s: float) -> None:
    """Kills the processes of ranks on this node, and returns when they have ended. Raises RuntimeError after the
    limit."""
    processes = [process for pid in pids if (process := _find_rank(pid)) is not None]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    end = time.monotonic() + limit_s
    while left := [process.pid for process in processes if is_running(process)]:
        if time.monotonic() > end:
            raise RuntimeError(
                f"the processes of a lost trainer must end within {limit_s:g} s, got {left} still there; look for "
                "a driver or a disk that does not answer (dmesg), or raise --rollout-cleanup-timeout"
            )
        time.sleep(0.02)


def _find_rank(pid: int) -> psutil.Process | None:
    """Returns the process of a rank, unless another process has its id by now."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if any("TrainerActor" in word for word in process.cmdline()):
            return process
    return None


def find_dead(liveness: Mapping[Ref, str], log: Path) -> RankLost | None:
    """Returns the error of the first rank whose process has ended, or None. `liveness` has calls that end only with
    their actor. `log` is the folder of the ranks' logs."""
    ended, _ = ray.wait(list(liveness), timeout=0)
    for ref in ended:
        name = liveness[ref]
        try:
            ray.get(ref)
        except RayActorError as error:
            return RankLost.from_error(ActorError.from_ray(name, error, log / f"{name}.log"))
        except RayError as error:
            return RankLost(name, f"{type(error).__name__}: {error}", log / f"{name}.log")
    return None
