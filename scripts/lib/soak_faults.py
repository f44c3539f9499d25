"""The faults of a soak test: each fault's effect on a run, and its end.

| fault | effect |
| --- | --- |
| engine, router, manager, trainer, driver, raylet, gcs | SIGKILL of the process |
| stopped engine | SIGSTOP of the engine's processes for 8 s |
| full disk | the disk of the run directory has no free byte, for 10 s or until the run has ended |
| delayed replies | no reply reaches the rollout manager for 5 s |
| cut replies | the next three replies end in the middle, with their connections |
| lost replies | the next two replies never arrive, and their connections stay open |
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from soak_parts import processes_of, with_children
from soak_proxy import Proxy

STOPPED_S, FULL_S, DELAYED_S = 8.0, 10.0, 5.0
CUT_REPLIES, LOST_REPLIES = 3, 2
DISK_MIB = 256
_FILLER = "filler"


@dataclass(frozen=True)
class Place:
    """The parts of a run that faults act on."""

    run_dir: Path
    driver: psutil.Process
    proxy: Proxy


@dataclass(frozen=True)
class Fault:
    """One kind of fault. `begin` returns False if its target does not exist now. `end` is called `holds_s` seconds
    later, or when the run has ended. If `ends_run` is true, the run may make a few more steps, but must end."""

    begin: Callable[[Place], bool]
    end: Callable[[Place], None] = lambda place: None
    holds_s: float = 0.0
    ends_run: bool = False


ENDING = ("manager", "trainer", "driver", "raylet", "gcs")
"""Processes whose loss ends a run."""


def _kill(part: str) -> Fault:
    def begin(place: Place) -> bool:
        for process in [place.driver] if part == "driver" else processes_of(part)[:1]:
            with contextlib.suppress(psutil.Error):
                process.kill()
                return True
        return False

    return Fault(begin, ends_run=part in ENDING)


def _stop(place: Place) -> bool:
    found = [one for process in processes_of("engine")[:1] for one in with_children(process)]
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.suspend()
    return bool(found)


def _continue(place: Place) -> None:
    for process in [one for engine in processes_of("engine") for one in with_children(engine)]:
        with contextlib.suppress(psutil.Error):
            process.resume()


def _fill(place: Place) -> bool:
    with (place.run_dir / _FILLER).open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass
    return True


def _empty(place: Place) -> None:
    (place.run_dir / _FILLER).unlink()


def _delay(place: Place) -> bool:
    place.proxy.hold_until = time.time() + DELAYED_S
    return True


def _cut(place: Place) -> bool:
    place.proxy.to_cut = CUT_REPLIES
    return True


def _lose(place: Place) -> bool:
    place.proxy.to_lose = LOST_REPLIES
    return True


FAULTS = {
    **{part: _kill(part) for part in ("engine", "router", *ENDING)},
    "stopped engine": Fault(_stop, _continue, STOPPED_S),
    "full disk": Fault(_fill, _empty, FULL_S),
    "delayed replies": Fault(_delay, holds_s=DELAYED_S),
    "cut replies": Fault(_cut),
    "lost replies": Fault(_lose),
}


def mount_small_disk(folder: Path) -> str | None:
    """Mounts a small file system at `folder`. Returns the reason if this user may not mount it."""
    folder.mkdir(parents=True)
    if os.getuid() != 0:
        return "mounting a small disk needs root"
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stderr.strip() or "mount failed" if done.returncode else None


def unmount(folder: Path) -> None:
    subprocess.run(["umount", str(folder)], check=True, capture_output=True)
