"""The work of `vime rollout` in its rollout manager: generates groups for the trainer of another process."""

from __future__ import annotations

import asyncio
import logging

from slime.records.errors import FlagError
from slime.rollout.state import GenerateState
from slime.rollout.straw.folder import DIR, RUN_ID, QueueFolder, folder_for, read_plain, require_same_sampling
from slime.rollout.straw.mailbox import POLL_S, Mailbox, OwnerRestarted
from slime.rollout.straw.storage import Storage
from slime.rollout.straw.worker import QueueWorker
from slime.rollout.stream.remote import QueuedWork
from slime.rollout.stream.sampling_settings import sampling_settings

logger = logging.getLogger(__name__)


def serve(state: GenerateState, name: str, ended: int) -> dict[str, int]:
    """Runs `RolloutHost.serve`."""
    host = RolloutHost(state, name, ended)
    state.part(QueuedWork, lambda: host)
    return state.run(host.serve())


class RolloutHost(QueuedWork):
    """One rollout host, by its name in the queue."""

    def __init__(self, state: GenerateState, name: str, ended: int = 0) -> None:
        """Makes a host that waits for a later start of the run than `ended`, which had ended when this process
        began."""
        self.state, self.name, self.ended = state, name, ended
        self.folder: QueueFolder = folder_for(state.config)
        self.worker: QueueWorker | None = None

    async def serve(self) -> dict[str, int]:
        """Works for every start of the run, until the run has ended. Returns the number of groups whose answers were
        taken, and of those that were discarded."""
        counts = {"answered": 0, "discarded": 0}
        storage = Storage(self.folder, self.state.config)
        lease_s = self.state.config.rollout.rollout_queue_lease_seconds
        start = self.ended
        try:
            while (start := await self._next_start(start)) > 0:
                (self.folder.hosts / self.name).mkdir(exist_ok=True, mode=0o700)
                link = Mailbox(self.folder, self.name, start)
                self.worker = QueueWorker(self.state, link, storage, lease_s)
                logger.info("start %d of the run has begun", start)
                try:
                    await self.worker.run()
                except OwnerRestarted:
                    logger.info("start %d of the run is over", start)
                finally:
                    counts["answered"] += self.worker.answered
                    counts["discarded"] += self.worker.discarded
        finally:
            await asyncio.to_thread(storage.close)
        return counts

    async def _next_start(self, after: int) -> int:
        """Waits for the next start of the run, and returns its number. Returns 0 if the run has ended. Raises
        ValueError if no run starts, or for a run that samples in another way."""
        flags, loop = self.state.config, asyncio.get_running_loop()
        end = loop.time() + flags.fault_tolerance.engine_start_timeout_s
        while True:
            found = read_plain(self.folder.state)
            if found is not None and found["ended"] and found["start"] != self.ended:
                return 0
            if found is not None and not found["ended"] and found["start"] != after:
                require_same_sampling(read_plain(self.folder.queue) or {}, sampling_settings(flags))
                return int(found["start"])
            if after == self.ended and loop.time() > end:
                raise FlagError(
                    DIR,
                    f"have a run within --engine-start-timeout-s {flags.fault_tolerance.engine_start_timeout_s:g}",
                    f"none in {self.folder.path}",
                    f"start the run, or name its folder and {RUN_ID}",
                )
            await asyncio.sleep(POLL_S)

    async def leave(self) -> None:
        """Returns the groups of this host to the queue, with their tokens."""
        if self.worker is not None:
            await self.worker.leave()

    async def close(self) -> None:
        """Does nothing, because `serve` has closed the files."""
