"""The faults of a soak: each fault's effect on a run, and its end.

| fault | effect |
| --- | --- |
| engine, router, trainer, manager, driver, raylet, gcs | SIGKILL of one process of the part |
| stopped-engine | SIGSTOP of an engine's processes for 8 s |
| full-disk | the disk of the run directory has no free byte, for 10 s or until the run has ended |
| delayed-replies | no reply reaches the rollout manager for 5 s |
| cut-replies | the next three replies end in the middle, with their connections |
| lost-replies | the next two replies never arrive, and their connections stay open |
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from vime.soak.parts import PARTS, Descendants, with_children
from vime.soak.proxy import Proxy

STOPPED_S, FULL_S, DELAYED_S = 8.0, 10.0, 5.0
CUT_REPLIES, LOST_REPLIES = 3, 2
_FILLER = "filler"


@dataclass
class Target:
    """The parts of a run that faults act on. `proxy` is None if no fault needs it."""

    run_dir: Path
    started: Descendants
    driver: psutil.Process
    proxy: Proxy | None
    chance: random.Random
    stopped: list[psutil.Process] = field(default_factory=list)


@dataclass(frozen=True)
class Fault:
    """One kind of fault. `begin` returns False if its target does not exist now. `end` is called `holds_s` seconds
    later, or when the run has ended. If `ends_run` is true, the run may make a few more steps, but must end. If
    `may_end_run` is true, the run may end, and its flags must allow a resume."""

    begin: Callable[[Target], bool]
    end: Callable[[Target], None] = lambda target: None
    holds_s: float = 0.0
    ends_run: bool = False
    may_end_run: bool = False
    hits_replies: bool = False


ENDING = ("driver", "raylet", "gcs")
"""Parts whose loss ends a run."""
RESUMING = ("manager", *ENDING)
"""Parts whose loss needs the files of --save."""


def _kill(part: str) -> Fault:
    def begin(target: Target) -> bool:
        found = [target.driver] if part == "driver" else target.started.find(part)
        if not found:
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            target.chance.choice(found).kill()
            return True
        return False

    return Fault(begin, ends_run=part in ENDING, may_end_run=part in RESUMING)


def _stop(target: Target) -> bool:
    if not (engines := target.started.find("engine")):
        return False
    target.stopped = with_children(target.chance.choice(engines))
    for process in target.stopped:
        with contextlib.suppress(psutil.Error):
            process.suspend()
    return True


def _continue(target: Target) -> None:
    for process in target.stopped:
        with contextlib.suppress(psutil.Error):
            process.resume()
    target.stopped = []


def _fill(target: Target) -> bool:
    with (target.run_dir / _FILLER).open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass
    return True


def _empty(target: Target) -> None:
    (target.run_dir / _FILLER).unlink(missing_ok=True)


def _delay(target: Target) -> bool:
    assert target.proxy is not None
    target.proxy.hold_until = time.time() + DELAYED_S
    return True


def _cut(target: Target) -> bool:
    assert target.proxy is not None
    target.proxy.to_cut = CUT_REPLIES
    return True


def _lose(target: Target) -> bool:
    assert target.proxy is not None
    target.proxy.to_lose = LOST_REPLIES
    return True


KILLS = {part: _kill(part) for part in PARTS}
"""Values of --kill."""
OTHERS = {
    "stopped-engine": Fault(_stop, _continue, STOPPED_S),
    "full-disk": Fault(_fill, _empty, FULL_S, may_end_run=True),
    "delayed-replies": Fault(_delay, holds_s=DELAYED_S, hits_replies=True),
    "cut-replies": Fault(_cut, hits_replies=True),
    "lost-replies": Fault(_lose, hits_replies=True),
}
"""Values of --faults."""
FAULTS = KILLS | OTHERS
