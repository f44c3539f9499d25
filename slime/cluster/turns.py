"""Defines how the trainer and the engines share devices. With --colocate, they take turns."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from slime.config import Config
from slime.protocols import EnginePool
from slime.tracking.timers import Timers


class DeviceSharing(Protocol):
    """The interface that the loop calls before and after the trainer's work."""

    def begin(self, timers: Timers | None = None) -> None:
        """Gives the devices to the trainer. A second call before `end` does nothing. With `timers`, the time counts as
        `sleep`."""
        ...

    def end(self, timers: Timers | None = None) -> bool:
        """Gives the devices back to the engines. Returns True if the engines dropped their weights, and serve after the
        next update. With `timers`, the time counts as `wake_up`."""
        ...


def share_devices(config: Config, engines: EnginePool) -> DeviceSharing:
    """Returns the rule by which the trainer and these engines share devices."""
    return SharedDevices(engines) if config.cluster.colocate else SeparateDevices()


class SeparateDevices:
    """Does nothing, because the trainer and the engines have separate devices."""

    def begin(self, timers: Timers | None = None) -> None: ...

    def end(self, timers: Timers | None = None) -> bool:
        return False


class SharedDevices:
    """Puts the engines to sleep while the trainer works."""

    def __init__(self, engines: EnginePool) -> None:
        self._engines = engines
        self._asleep = False

    def begin(self, timers: Timers | None = None) -> None:
        if self._asleep:  # The trainer was lost while the engines slept.
            return
        with _measured(timers, "sleep"):
            self._engines.sleep()
        self._asleep = True

    def end(self, timers: Timers | None = None) -> bool:
        self._asleep = False
        with _measured(timers, "wake_up"):
            return self._engines.wake()


def _measured(timers: Timers | None, name: str) -> AbstractContextManager[None]:
    return nullcontext() if timers is None else timers.measure(name)
