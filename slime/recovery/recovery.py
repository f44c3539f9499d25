"""Starts the trainer again inside a run, and repeats the steps that its last checkpoint does not have.

    a call of the trainer raises TrainerLost, or `check` finds a dead rank
        -> the ranks end and start again from the newest checkpoint of this run, or as at the start of the run
        -> the steps since then are trained again, in order, with the same data
        -> the call runs again

Engines, router, rollout manager and journal continue meanwhile. With the same layout of ranks, a repeated step gives
bitwise equal weights. The loop reports each step once, because only the loop reports, and it gets no result of a
repeated step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from slime.cluster.turns import DeviceSharing
from slime.config import Config
from slime.protocols import RolloutBatch, TrainerHandle, TrainerLost
from slime.roles.recovery_points import find_point
from slime.system.waiting import report_wait, wait
from slime.tracking.events import Events
from slime.tracking.timers import Timers

T = TypeVar("T")
_MOST_STEPS = 100
"""Number of steps whose data is kept without a checkpoint."""
_MOST_BYTES = 4 << 30
"""Bytes of that data. Ray writes the part that does not fit into its shared memory to the disk."""
_PAUSE_S = 5.0
"""Seconds before a second restart without a new step, times the number of restarts."""
_DEATH_S = 3.0
"""Seconds in which a dead rank shows after another error."""


class RunParts(Protocol):
    """The functions of the loop that a restart calls."""

    def publish_now(self, version: int) -> None:
        """Sends the weights to the engines."""
        ...

    def check_engines(self) -> None:
        """Raises an error if an engine is lost."""
        ...


@dataclass(frozen=True)
class _Crash:
    """A loss of the trainer during the call `doing`. `cause` is `TrainerLost.cause`."""

    doing: str
    cause: str


class Recovery:
    """Calls the trainer for the loop. `start` is the first rollout of the run."""

    def __init__(
        self,
        config: Config,
        trainer: TrainerHandle,
        parts: RunParts,
        turns: DeviceSharing,
        events: Events,
        start: int,
    ) -> None:
        self._config, self._trainer, self._parts, self._turns = config, trainer, parts, turns
        self._events = events
        self._trained = start
        """The first rollout that was not trained."""
        self._data: dict[int, RolloutBatch] = {}
        """The rollouts that may have to be repeated."""
        self._keeps_data = True
        self._saved: list[int] = []
        self._restarts = 0
        self._crash: _Crash | None = None

    def add(self, rollout_id: int, batch: RolloutBatch) -> None:
        """Stores the data of a rollout that was trained. Drops the oldest data beyond the limits."""
        if self._keeps_data:
            self._data[rollout_id] = batch
        self._trained = rollout_id + 1
        self._restarts, self._crash = 0, None
        flags = self._config.checkpoint
        most = max(_MOST_STEPS, flags.save_interval or 0)
        has_point = flags.save is not None and not flags.no_save_optim
        while len(self._data) > most or sum(one.data_bytes for one in self._data.values()) > _MOST_BYTES:
            del self._data[min(self._data)]
            if not has_point:  # a restart would begin with the first step, so it cannot use the rest
                self._data.clear()
                self._keeps_data = False

    def save_in_memory(self, rollout_id: int, timers: Timers) -> None:
        """Writes the checkpoint of --recover-from memory after a rollout."""
        if self._config.fault_tolerance.recover_from == "memory":
            with timers.measure("save_in_memory"):
                self.run(f"saving rollout {rollout_id} in memory", lambda: self._save_now(rollout_id))
            # the copies on other nodes may be one step old
            self._data = {number: data for number, data in self._data.items() if number == rollout_id}

    def _save_now(self, rollout_id: int) -> None:
        self._turns.begin()
        wait(self._trainer.save_in_memory(rollout_id), self._parts.check_engines)

    def saved(self, rollout_id: int) -> None:
        """Drops the data of the rollouts that a complete checkpoint has. With --async-save, the checkpoint before
        `rollout_id` is complete."""
        complete = rollout_id
        if self._config.checkpoint.async_save:
            complete = self._saved[-1] if self._saved else -1
        self._saved = [*self._saved[-1:], rollout_id]
        if not self._config.checkpoint.no_save_optim:
            self._data = {number: data for number, data in self._data.items() if number > complete}

    def run(self, doing: str, call: Callable[[], T]) -> T:
        """Returns the result of `call`. If the trainer is lost meanwhile, it starts again, and `call` runs again.
        `doing` describes the call, such as "training rollout 3"."""
        while True:
            try:
                return call()
            except RuntimeError as error:
                self._bring_back(doing, self._find_loss(error))

    def check(self) -> None:
        """Starts the trainer again if a rank has died. For waits in which the trainer is idle."""
        try:
            self._trainer.check()
        except TrainerLost as lost:
            self._bring_back(f"waiting for rollout {self._trained}", lost)

    def _find_loss(self, error: RuntimeError) -> TrainerLost:
        """Returns the loss that caused `error`, which may be an engine's error. Raises `error` if all ranks live."""
        if isinstance(error, TrainerLost):
            return error
        end = time.monotonic() + _DEATH_S
        while time.monotonic() < end:
            try:
                self._trainer.check()
            except TrainerLost as lost:
                return lost
            time.sleep(0.1)
        raise error

    def _bring_back(self, doing: str, lost: TrainerLost) -> None:
        """Restarts the trainer, several times if necessary, until it has the state before the loss."""
        while True:
            self._require_restart(doing, lost)
            began = time.monotonic()
            self._events.add("trainer_lost", rollout=self._trained, phase=doing, text=str(lost))
            print(f"note: {lost}; the trainer starts again", file=sys.stderr, flush=True)
            try:
                first = self._restart()
            except RuntimeError as error:
                doing, lost = f"starting again after {doing}", self._find_loss(error)
                continue
            seconds = time.monotonic() - began
            repeated = self._trained - first
            self._events.add("trainer_restarted", rollout=first, repeated=repeated, seconds=round(seconds, 3))
            print(
                f"note: the trainer is back after {seconds:.1f} s; it has repeated {repeated} steps",
                file=sys.stderr,
                flush=True,
            )
            return

    def _require_restart(self, doing: str, lost: TrainerLost) -> None:
        """Raises the loss if the trainer may not start again: its last crash was the same, or it has crashed too often
        without a new step. Waits before a second restart."""
        most = self._config.fault_tolerance.max_trainer_restarts
        crash = _Crash(doing, lost.cause)
        if crash == self._crash:
            print(f"note: the trainer was lost twice while {doing}, so it stays ended", file=sys.stderr)
            raise lost
        if self._restarts >= most:
            raise lost
        time.sleep(_PAUSE_S * self._restarts)
        self._restarts, self._crash = self._restarts + 1, crash

    def _restart(self) -> int:
        """Returns the first rollout after the checkpoint from which the trainer has continued."""
        check = self._parts.check_engines
        with report_wait("starting the trainer again"), self._events.phase("recovery", rollout=self._trained):
            self._trainer.end_ranks()  # first, because engines need memory to fall asleep in the middle of an update
            self._turns.begin()
            point = find_point(self._config, self._saved, self._trainer.find_states)
            with self._trainer.restarted(point, check) as first:
                for rollout_id in range(first, self._trained):
                    wait(self._trainer.train(rollout_id, self._find_data(rollout_id)), check)
                    if rollout_id in self._saved:  # its files were being written
                        wait(self._trainer.save(rollout_id), check)
            if self._turns.end():
                self._parts.publish_now(self._trained)
        return first

    def _find_data(self, rollout_id: int) -> list[object]:
        if (found := self._data.get(rollout_id)) is None:
            raise RuntimeError(
                f"the data of rollout {rollout_id} must be there to train it again, got only the data of the last "
                f"{len(self._data)} rollouts; set --save and a shorter --save-interval"
            )
        return found.rank_data
