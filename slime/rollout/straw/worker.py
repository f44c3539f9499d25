"""Generates the groups of a queue with the engines of this process: a part of the manager's state, and of a host's.

    lease a task -> take its tokens over -> wait for its weights -> generate and score -> answer
                         every --rollout-snapshot-s: save the tokens so far;  three times per lease: renew it

A group whose lease is lost ends at once, because another host has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field

from slime.rollout import generate
from slime.rollout.context import RunContext
from slime.rollout.state import GenerateState, random_stream, rollout_sampling_params
from slime.rollout.straw.folder import Plain
from slime.rollout.straw.groups import GroupAnswer, GroupTask
from slime.rollout.straw.mailbox import Link, OwnerRestarted
from slime.rollout.straw.storage import DAMAGED, Reference, Storage
from slime.rollout.stream.ages import find_age_limit
from slime.rollout.stream.failures import find_reason, require_samples
from slime.rollout.stream.groups import StreamGroup
from slime.rollout.stream.parts import SHARE, AnswersSoFar
from slime.rollout.stream.restoring import restore_group
from slime.rollout.stream.snapshots import copy_group

logger = logging.getLogger(__name__)
IDLE_S = 0.2
RENEWALS = 3
"""Renewals of a lease within its time."""


@dataclass
class HeldTask:
    """A task that this process generates."""

    lease: Plain
    task: GroupTask | None = None
    entry: StreamGroup | None = None
    saved: object = None
    """`GroupCopy.key` of the tokens that the queue has."""


@dataclass
class QueueWorker:
    """Leases tasks until it is cancelled. `discarded` counts answers that another lease had made superfluous."""

    state: GenerateState
    link: Link
    storage: Storage
    lease_s: float
    discarded: int = 0
    answered: int = 0
    _held: dict[asyncio.Task[None], HeldTask] = field(default_factory=dict)
    _leaving: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Works until the owner of the queue starts again or ends (OwnerRestarted), or until a cancellation."""
        flags = self.state.config
        self._context = RunContext.from_state(self.state)
        self._every_s = flags.fault_tolerance.rollout_snapshot_s
        if self._every_s and not flags.kernels.rlk_bitwise:  # an unfinished answer starts again there
            self.state.part(AnswersSoFar, lambda: AnswersSoFar(self._every_s * SHARE))
        try:
            async with asyncio.TaskGroup() as loops:
                loops.create_task(self._lease())
                loops.create_task(self._renew())
                if self._every_s:
                    loops.create_task(self._save())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            await self._end_all()

    def wake(self) -> None:
        """Looks for tasks now. Call it in the event loop."""
        self._news.set()

    async def leave(self) -> None:
        """Ends the groups and returns their tasks with the tokens so far."""
        self._leaving = True
        for held in list(self._held.values()):
            await self._save_one(held)
        leases = [held.lease for held in self._held.values()]
        await self._end_all()
        await self.link.call("leave", leases=leases)

    async def _end_all(self) -> None:
        for task in list(self._held):
            task.cancel()
        if self._held:
            await asyncio.wait(list(self._held))

    async def _lease(self) -> None:
        while not self._leaving:
            size = self._context.config.data.n_samples_per_prompt
            free = max(1, self.state.concurrency // size) - len(self._held)
            found = await self.link.call("lease", count=free, held=len(self._held)) if free > 0 else []
            for each in found:
                held = HeldTask(each["lease"])
                task = asyncio.create_task(self._work(held, each["task"]))
                self._held[task] = held
                task.add_done_callback(self._forget)
            if not found:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), IDLE_S)
                self._news.clear()

    def _forget(self, task: asyncio.Task[None]) -> None:
        held = self._held.pop(task)
        self.wake()
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, OwnerRestarted):
            logger.error("task %s failed", held.lease["task_id"], exc_info=error)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self.lease_s / RENEWALS)
            held = dict(self._held)
            leases = [each.lease for each in held.values()]
            known = await self.link.call("renew", leases=leases) if leases else []
            for task, ours in zip(held, known, strict=True):
                if not ours:
                    task.cancel()

    async def _save(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            for held in list(self._held.values()):
                await self._save_one(held)

    async def _save_one(self, held: HeldTask) -> None:
        """Stores the tokens of a group, if it has new ones."""
        if held.entry is None or held.task is None:
            return
        made = copy_group(held.entry, self.state)
        if not made.tokens or made.key == held.saved:
            return
        reference = await self.storage.write(held.task.with_copy(made).text())
        if await self.link.call("save", lease=held.lease, reference=reference):
            held.saved = made.key

    async def _work(self, held: HeldTask, reference: Reference) -> None:
        """Generates one group and answers."""
        try:
            text = await self.storage.read(reference)
        except DAMAGED as error:
            await self.link.call("damaged", lease=held.lease, text=str(error))
            return
        task = held.task = GroupTask.from_text(text)
        entry = StreamGroup(task.original, task.version, task.original, task.prompts)
        limit = find_age_limit(self._context.config.rollout)
        restore_group(entry, task.samples, task.version, self.state, task.rollout, limit)
        held.entry = entry
        try:
            await self._has_weights(task.version)
            answer = await self._generate(entry, task.rollout)
        finally:
            self.state.forget(entry.original)
        tags = {name: held.lease[name] for name in ("task_id", "attempt_id")}
        made = await self.storage.write(_text(answer), tags)
        taken = await self.link.call("answer", lease=held.lease, reference=made)
        self.answered += taken
        self.discarded += not taken

    async def _has_weights(self, version: int) -> None:
        """Returns when the engines have the weights with which the group was drawn, or newer ones."""
        while self.state.version is None or self.state.version < version:
            await asyncio.sleep(IDLE_S / 4)

    async def _generate(self, entry: StreamGroup, rollout_id: int) -> GroupAnswer:
        params = rollout_sampling_params(self._context.config.rollout)
        try:
            made = await generate.finish_group(self._context, entry.group, params, rollout_id=rollout_id)
            require_samples(made)
        except OSError:
            raise  # the engines of this host do not answer: its leases end, and other hosts take over
        except Exception as error:  # border with users' code: the owner of the queue raises it
            policy = self._context.config.fault_tolerance.failed_samples
            reason = None if policy == "end" else find_reason(error)
            if reason is None:
                logger.exception("group %s failed", entry.original[0].group_index)
            return GroupAnswer([], error=f"{type(error).__name__}: {error}", reason=reason)
        streams = map(random_stream, entry.original)
        late = {stream: self.state.timed_out[stream] for stream in streams if stream in self.state.timed_out}
        return GroupAnswer(made, timed_out=late)


def _text(answer: GroupAnswer) -> bytes:
    """Returns the record of an answer. Samples that cannot be stored are an error, which ends the run."""
    try:
        return answer.text()
    except ValueError as error:
        return GroupAnswer([], error=str(error)).text()
