"""The queue in the stream of groups: whichever host leases a group generates it. A part of the manager's state."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field

from slime.rollout.request_abort import CancelledCalls
from slime.rollout.state import GenerateState
from slime.rollout.straw.folder import QueueFolder, write_plain
from slime.rollout.straw.groups import GroupAnswer, GroupTask
from slime.rollout.straw.mailbox import Postman
from slime.rollout.straw.service import QueueService, name_task
from slime.rollout.straw.storage import DAMAGED, Reference, Storage
from slime.rollout.straw.worker import QueueWorker
from slime.rollout.stream.groups import StreamGroup, get_number
from slime.rollout.stream.remote import RemoteGroups
from slime.rollout.stream.restoring import find_versions
from slime.types import Sample, SampleGroup

logger = logging.getLogger(__name__)


class HostError(RuntimeError):
    """A rollout host could not generate a group. `failed_sample` is the reason of --failed-samples, or None."""

    def __init__(self, text: str, reason: str | None = None) -> None:
        super().__init__(text)
        self.failed_sample = reason


@dataclass
class RolloutQueue(RemoteGroups):
    """Generates groups through the queue. The stream calls `finish` instead of generating a group itself."""

    state: GenerateState
    folder: QueueFolder
    service: QueueService
    storage: Storage
    start: int
    """The number of this start of the run."""
    worker: QueueWorker | None = None
    work: Future[None] | None = None
    """The run of `worker`."""
    postman: Postman | None = None
    _count: int = 0
    _waiting: dict[str, asyncio.Future[tuple[Reference | None, str]]] = field(default_factory=dict)

    async def finish(self, entry: StreamGroup, rollout_id: int) -> SampleGroup:
        """Returns the group with its responses and rewards, from any host. Samples are ABORTED if the rollout ends
        first. Raises HostError for a group without samples."""
        task = GroupTask.from_entry(entry, rollout_id)
        while True:
            found = await self._ask(task)
            if isinstance(found, list):
                return found
            reference, text = found
            answer = None if reference is None else await self._read(task, reference)
            if reference is None and text:
                raise HostError(text)
            if answer is not None:
                return self._take(entry, answer)

    def take_metrics(self) -> dict[str, float]:
        """Returns the counts since the last call."""
        return {f"rollout/queue/{name}": count for name, count in self.service.take_counts().items()}

    def deliver(self, task: str, reference: Reference | None, text: str) -> None:
        """Implements `OnAnswer`."""
        if (loop := self.state.loop) is not None:
            loop.call_soon_threadsafe(self._deliver, task, reference, text)

    def note_checkpoint(self, outstanding: Collection[int]) -> None:
        self.service.release(outstanding)

    def fail(self, error: BaseException) -> None:
        """Ends the groups that wait with an error. Call it in the event loop."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    async def leave(self) -> None:
        """Stores the tokens of the manager's own groups, and lets all hosts end, because the run ends."""
        if self.worker is not None:
            await self.worker.leave()
        write_plain(self.folder.state, {"start": self.start, "ended": True})

    async def close(self) -> None:
        """Ends the threads and files of the queue. It has no running group."""
        if self.work is not None:
            self.work.cancel()
        if self.postman is not None:
            await asyncio.to_thread(self.postman.close)
        await asyncio.to_thread(self.storage.close)
        self.service.close()

    def _deliver(self, task: str, reference: Reference | None, text: str) -> None:
        future = self._waiting.pop(task, None)
        if future is not None and not future.done():
            future.set_result((reference, text))

    async def _ask(self, task: GroupTask) -> tuple[Reference | None, str] | SampleGroup:
        """Submits a task and waits for its answer. Returns samples, ABORTED, if the rollout ends first."""
        reference = await self.storage.write(task.text())
        self._count += 1
        name = name_task(task.number, self.start, self._count)
        future = self._waiting[name] = asyncio.get_running_loop().create_future()
        facts = {"version": task.version, "rollout": task.rollout}
        try:
            await self.storage.run(self.service.submit, name, task.number, reference, facts)
            if self.worker is not None:
                self.worker.wake()
            calls = self.state.part(CancelledCalls, CancelledCalls)
            found = await calls.run(future)
            return self._aborted(task, name) if found is None else found
        finally:
            if self._waiting.pop(name, None) is not None:
                self.service.cancel(name)

    def _aborted(self, task: GroupTask, name: str) -> SampleGroup:
        """Ends a task, and returns its group with the tokens that were saved last."""
        newest = self.service.cancel(name)
        samples = (
            task.samples if newest is None else GroupTask.from_text(self.storage.read_now(newest)).samples
        )
        for sample in samples:
            if sample.reward is None:
                sample.status = Sample.Status.ABORTED
        return samples

    async def _read(self, task: GroupTask, reference: Reference) -> GroupAnswer | None:
        """Returns an answer that may be used, or None if the group must be generated again."""
        try:
            answer = GroupAnswer.from_text(await self.storage.read(reference))
        except DAMAGED as error:
            self.service.discard("", task.number, "damaged", str(error))
            return None
        versions = {v for sample in answer.samples for v in find_versions(sample, task.version)}
        if versions and min(versions) < task.version:
            text = f"tokens of version {min(versions)}, and the group was drawn at version {task.version}"
            self.service.discard("", task.number, "stale", text)
            return None
        return answer

    def _take(self, entry: StreamGroup, answer: GroupAnswer) -> SampleGroup:
        if answer.error:
            raise HostError(answer.error, answer.reason)
        self.state.timed_out |= answer.timed_out
        names = {sample.index: sample.session_id for sample in answer.samples}
        for sample in entry.original:
            sample.session_id = names.get(
                sample.index, sample.session_id
            )  # the stream looks them up in `timed_out`
        logger.debug("group %d is ready", get_number(entry.original))
        return answer.samples
