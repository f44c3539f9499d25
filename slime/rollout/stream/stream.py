"""This module owns the stream of groups: it draws prompts, generates groups concurrently, filters, and cuts batches.

    data source --draw--> running --finish--> filter --kept--> ready --cut--> batch of --rollout-batch-size groups
        ^                    |                  |
        |                    |                  +--dropped--> counted by reason; new groups are drawn
        +--partial-rollout---+--when the batch is full and no rollout may run ahead, the rest is aborted

Rollouts ahead (--max-staleness). A group that was drawn at weights u may be in the batches up to u + max_staleness. The
stream holds enough groups to fill all batches that the loop has requested. A batch takes the groups that finish first,
and prefers groups of older weights. It waits for a running group only if no later batch could take the group in time.
The other groups stay in the stream, and their requests continue while weights change. When a group is drawn at weights
u, the loop has requested at most (u + max_staleness + 1) * --rollout-batch-size groups, so all groups of that age fit
(AReaL, 2505.24298). Over-sampling draws more groups than that, and these may get too old (--stale-samples).

No rollout ahead (--max-staleness 0). A batch ends all running groups. Without --partial-rollout, groups that are
running when the batch is full are discarded, as in slime. Their prompts return in the next epoch. With
--partial-rollout, these groups return to the data source with their tokens, and so does a group that finished after the
batch was full.
"""

from __future__ import annotations

import asyncio
import logging

from slime.hooks import load_function
from slime.protocols import DataSource
from slime.rollout import generate
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.context import RunContext
from slime.rollout.filter_hub.base_types import call_dynamic_filter, should_drop_dynamic_filter_output
from slime.rollout.metrics import compute_statistics
from slime.rollout.request_abort import abort_calls
from slime.rollout.state import GenerateState, rollout_sampling_params
from slime.rollout.stream import ages
from slime.rollout.stream.drops import Drops
from slime.rollout.stream.failures import Failures, drop_failed, require_samples
from slime.rollout.stream.groups import (
    StreamGroup,
    get_index,
    get_number,
    hash_prompts,
    restarted,
    resumable,
)
from slime.rollout.stream.remote import QueuedWork, RemoteGroups
from slime.rollout.stream.snapshots import Snapshots
from slime.types import Sample, SampleGroup

logger = logging.getLogger(__name__)

MIN_LATE_GROUPS = 8
"""A rollout raises an error after max(this, --rollout-batch-size) groups in a row have passed their deadline."""

_ABORT_EVERY_S = 1.0


async def generate_rollout_async(
    state: GenerateState, rollout_id: int, data_source: DataSource
) -> RolloutFnTrainOutput:
    """Returns `--rollout-batch-size` groups that passed the filter, sorted by index, and the counts of dropped groups.

    The result is deterministic if the engine is, no request is aborted and no rollout runs ahead. With
    --over-sampling-batch-size above --rollout-batch-size, the groups that finish first are used. An error of a reward,
    filter or generate function names the sample. Raises RuntimeError if the filter drops every group. Raises
    TimeoutError if a whole batch of groups in a row (at least 8) passes --rollout-deadline-s.
    """
    stream = state.part(Stream, lambda: Stream(state, data_source))
    if stream.data_source is not data_source:
        state.drop_part(Stream)
        stream = state.part(Stream, lambda: Stream(state, data_source))
    return await stream.batch(rollout_id)


def unfinished(state: GenerateState) -> list[StreamGroup]:
    """Returns the groups that were drawn and are in no batch, with their responses so far."""
    stream = state.has_part(Stream)
    return [] if stream is None else [*stream.ready, *stream.running.values()]


def outstanding(state: GenerateState) -> list[SampleGroup]:
    """Returns the groups that were drawn and are in no batch, as the data source first returned them, sorted by index.
    A checkpoint stores them, and a run that resumes draws them first, with the same random streams."""
    stream = state.has_part(Stream)
    return [] if stream is None else stream.outstanding()


async def stop(state: GenerateState) -> None:
    """Cancels all running groups."""
    if (stream := state.has_part(Stream)) is not None:
        state.drop_part(Stream)
        await stream.cancel()


class Stream:
    """The running and ready groups of a run. `batch` cuts the next batch; only one call may run at a time."""

    def __init__(self, state: GenerateState, data_source: DataSource) -> None:
        self.state, self.data_source = state, data_source
        self.running: dict[asyncio.Task[SampleGroup], StreamGroup] = {}
        self.ready: list[StreamGroup] = []
        """Finished groups that passed the filter and are in no batch, in the order in which they finished."""
        self.surplus: list[SampleGroup] = []
        self._begin(0)

    def _begin(self, rollout_id: int) -> None:
        """Resets the fields that belong to a batch. Hooks may have changed their `args` since the previous batch."""
        self.context = RunContext.from_state(self.state)
        self.flags, data = self.context.config.rollout, self.context.config.data
        self.target, self.group_size = data.rollout_batch_size, data.n_samples_per_prompt
        self.runs_ahead = self.context.config.rollouts_ahead > 0
        self.age_limit = ages.find_age_limit(self.flags)
        path = self.flags.dynamic_sampling_filter_path
        self.filter = load_function(path, flag="--dynamic-sampling-filter-path") if path else None
        self.rollout_id = rollout_id
        self.finished: list[SampleGroup] = []
        self.drops = Drops(rollout_id, self.target, self.state.events)
        self.late = 0

    async def batch(self, rollout_id: int) -> RolloutFnTrainOutput:
        """Returns the groups of rollout `rollout_id`."""
        self.state.begin()
        self._begin(rollout_id)
        if (snapshots := self.state.has_part(Snapshots)) is not None:
            snapshots.release()
        try:
            await self.collect()
            return await self.finish()
        except BaseException:
            if snapshots is not None:
                snapshots.hold()
            self.state.aborted = True
            await self.cancel()
            raise
        finally:
            self.state.end()

    async def collect(self) -> None:
        """Draws groups while there is room, and takes finished groups, until the batch is full."""
        wanted = self.target * self.group_size
        self.expire()
        while not self.is_full():
            while (missing := self.count_missing()) > 0:
                self.draw(missing)
            await self.state.changed(self.running)
            done = [task for task in self.running if task.done()]
            for task in sorted(done, key=lambda task: get_index(self.running[task].original)):
                group = task.result()  # an error leaves the group in `running`, for the last snapshot
                self.take(self.running.pop(task), group)
            self.state.progress = (min(len(self.ready), self.target) * self.group_size, wanted)

    def is_full(self) -> bool:
        """Returns True if the batch has its groups, and later batches have room for all remaining groups."""
        if len(self.ready) < self.target:
            return False
        return not self.runs_ahead or not any(map(self.must_wait, range(self.flags.max_staleness + 1)))

    def must_wait(self, batches: int) -> bool:
        """Returns True if this batch must wait for old groups.

        Some groups will be too old after `batches` more batches. This batch must wait if three conditions hold: these
        batches have room for fewer groups than that, an old group still runs, and this batch would otherwise take a
        younger group.
        """
        oldest = self.rollout_id + batches - self.flags.max_staleness
        chosen = self.chosen()
        late = [entry for entry in self.running.values() if entry.version <= oldest]
        left = [entry for entry in self.ready if entry.version <= oldest and entry not in chosen]
        younger = any(entry.version > oldest for entry in chosen)
        return bool(late) and younger and len(late) + len(left) > batches * self.target

    def chosen(self) -> list[StreamGroup]:
        """Returns the ready groups for the batch, sorted by the age of their weights and then by their finish."""
        order = sorted(self.ready, key=lambda entry: entry.version) if self.runs_ahead else self.ready
        return order[: self.target]

    def count_missing(self) -> int:
        """Returns the number of groups to draw, for this batch and for later batches that the loop has requested."""
        batches = max(self.state.allowed, self.rollout_id) - self.rollout_id + 1 if self.runs_ahead else 1
        return batches * self.target - len(self.ready) - len(self.running)

    def draw(self, missing: int) -> None:
        """Starts generation of the next --over-sampling-batch-size groups of the data source. With rollouts ahead and
        without over-sampling, it starts `missing` groups. Further groups would be too old for their batch."""
        wanted = self.flags.over_sampling_batch_size or self.target
        if self.runs_ahead and wanted <= self.target:
            wanted = missing
        groups = self.data_source.get_samples(wanted)
        if not groups:
            raise ValueError(
                "--data-source-path must return groups from get_samples, got none; return groups until the run ends"
            )
        version = self.rollout_id if self.state.version is None else self.state.version
        for group in groups:
            if ages.is_stale(group, self.rollout_id, self.age_limit):
                self.drop("stale", group)
                continue
            self.start(group, version)
        numbers = [get_number(group) for group in groups]
        get_locations = getattr(
            self.data_source, "get_locations", None
        )  # a plug-in's data source may lack it
        prompts = {} if get_locations is None else {"prompts": get_locations(numbers)}
        self.state.events.add("drawn", groups=numbers, version=version, **prompts)

    def start(self, group: SampleGroup, version: int) -> None:
        """Starts generation of a group, with the tokens that a snapshot has for it."""
        entry = StreamGroup(group, version, group)
        if (snapshots := self.state.has_part(Snapshots)) is not None:
            entry.prompts = hash_prompts(group)
            snapshots.restore(entry, self.rollout_id, self.age_limit)
        self.running[asyncio.create_task(self.generate(entry))] = entry

    async def generate(self, entry: StreamGroup) -> SampleGroup:
        """Returns the group with its responses and rewards."""
        params, group = rollout_sampling_params(self.flags), entry.group
        try:
            if isinstance(remote := self.state.has_part(QueuedWork), RemoteGroups):
                return await remote.finish(entry, self.rollout_id)
            made = await generate.finish_group(self.context, group, params, rollout_id=self.rollout_id)
            require_samples(made)
            return made
        except Exception as error:  # border with users' code: other errors are raised again
            policy = self.context.config.fault_tolerance.failed_samples
            if not drop_failed(self.state, policy, group, error):
                raise
            return group
        finally:
            slowest = self.state.spans.slowest(group)
            self.state.events.add("ended", groups=[get_number(group)], **slowest)

    def expire(self) -> None:
        """Drops the groups that are too old for this batch, with --stale-samples drop."""
        if not self.runs_ahead or self.flags.stale_samples != "drop":
            return
        for entry in [entry for entry in self.ready if self.is_expired(entry)]:
            self.ready.remove(entry)
            self.drop("stale", entry.original)
        for task in [task for task, entry in self.running.items() if self.is_expired(entry)]:
            original = self.running.pop(task).original
            self.state.forget(original)
            task.cancel()
            self.drop("stale", original)

    def is_expired(self, entry: StreamGroup) -> bool:
        return entry.age(self.rollout_id) > self.flags.max_staleness

    def take(self, entry: StreamGroup, group: SampleGroup) -> None:
        """Keeps or drops a finished group, or adds it to the surplus."""
        entry.group, entry.is_ready = group, True
        if any(s.status is Sample.Status.ABORTED for s in group):
            self.give_up(entry.original, group)
            return
        self.state.forget(entry.original)
        self.late = 0
        self.finished.append(group)
        if len(self.ready) == self.target and not self.runs_ahead:
            self.surplus.append(resumable(entry.original, group))
            return
        output = call_dynamic_filter(self.filter, self.context.hook_args, group)
        left = len(self.ready) + len(self.running) + 1
        if should_drop_dynamic_filter_output(output, left, self.target):
            self.drop(output.reason or "filtered", entry.original)
            return
        self.ready.append(entry)
        self.state.events.add("kept", groups=[get_number(entry.original)])
        self.drops.end_series()

    def give_up(self, original: SampleGroup, group: SampleGroup) -> None:
        """Drops a group that was ended by its deadline or by an abort from outside before the batch was full.

        A late group does not return to the buffer, because every rollout would draw it first and end it late again.
        """
        reasons = self.state.forget(original)
        failure = self.state.part(Failures, Failures).dropped.pop(get_number(original), None)
        self.late += bool(reasons) or failure is not None
        if failure is not None:
            if self.late >= max(self.target, MIN_LATE_GROUPS):
                raise failure.error
            self.drop(failure.reason, original)
            return
        if reasons and self.late >= max(self.target, MIN_LATE_GROUPS):
            raise TimeoutError(
                f"--rollout-deadline-s must suffice for a response, got {self.flags.rollout_deadline_s} s and "
                f"{self.late} groups in a row that passed it; last: {reasons[-1]}"
            )
        if self.flags.partial_rollout and not reasons:
            self.put_back([resumable(original, group)])
            self.drops.count("aborted")
        else:
            self.drop("deadline" if reasons else "aborted", original)

    def drop(self, reason: str, group: SampleGroup) -> None:
        self.state.events.add("dropped", groups=[get_number(group)], reason=reason)
        self.drops.count(reason)

    async def finish(self) -> RolloutFnTrainOutput:
        """Cuts the batch, ends the groups that may not continue, and runs the hooks on the batch."""
        metrics: dict[str, float] = {**self.drops.metrics.collect()}
        if not self.runs_ahead:
            metrics |= await self.end_rest()
        for figure, values in self.state.take_figures().items():
            metrics |= {f"perf/{figure}/{name}": value for name, value in compute_statistics(values).items()}
        cut = self.cut()
        if self.age_limit:
            metrics |= self.staleness(cut)
        has = self.state.has_part
        for part in (has(Snapshots), has(Failures), has(QueuedWork)):
            metrics |= {} if part is None else part.take_metrics()
        groups = [entry.group for entry in cut]
        numbers = [get_number(entry.original) for entry in cut]
        over_limit = int(metrics.get("rollout/staleness/over_limit", 0))
        self.state.events.add("batch", rollout=self.rollout_id, groups=numbers, over_limit=over_limit)
        if observe := getattr(self.data_source, "observe", None):  # a plug-in's data source may lack it
            observe(sorted(self.finished, key=get_index))
        if path := self.flags.rollout_sample_filter_path:
            load_function(path, flag="--rollout-sample-filter-path")(self.context.hook_args, groups)
        if path := self.flags.rollout_all_samples_process_path:
            hook = load_function(path, flag="--rollout-all-samples-process-path")
            hook(self.context.hook_args, sorted(self.finished, key=get_index), self.data_source)
        return RolloutFnTrainOutput(samples=groups, metrics=metrics)

    def cut(self) -> list[StreamGroup]:
        """Removes the batch from the ready groups and returns it, sorted by index."""
        cut = self.chosen()
        self.ready = [entry for entry in self.ready if entry not in cut]
        return sorted(cut, key=lambda entry: get_index(entry.group))

    def staleness(self, cut: list[StreamGroup]) -> dict[str, float]:
        """Returns the age metrics of the batch in weight updates. Tokens older than `age_limit` are counted, and with
        --stale-samples mask they are not trained on."""
        masks = self.flags.stale_samples == "mask"
        found = ages.figures(cut, self.rollout_id, self.age_limit, masks=masks)
        return {f"rollout/staleness/{name}": value for name, value in found.items()}

    async def end_rest(self) -> dict[str, float]:
        """Aborts the running groups, and puts them back or discards them."""
        self.state.aborted = True
        cut_off = await self.end_pending() + self.surplus
        self.surplus = []
        self.state.aborted = False
        if not cut_off:
            return {}
        if not self.flags.partial_rollout:
            numbers = [get_number(group) for group in cut_off]
            self.state.events.add("dropped", groups=numbers, reason="discarded")
            return {"rollout/partial/groups_discarded": len(cut_off)}
        self.put_back(sorted(cut_off, key=get_index))
        return {"rollout/partial/groups_put_back": len(cut_off)}

    def outstanding(self) -> list[SampleGroup]:
        """Implements the function `outstanding` of this module."""
        entry = sorted([*self.ready, *self.running.values()], key=lambda entry: get_index(entry.original))
        return [[restarted(sample) for sample in one.original] for one in entry]

    async def end_pending(self) -> list[SampleGroup]:
        """Aborts every request until all groups have returned. After --rollout-deadline-s, cancels the other groups.

        The abort repeats, because a generate function with several turns sends its next request after an abort.
        """
        give_up_at = asyncio.get_running_loop().time() + self.flags.rollout_deadline_s
        ended = []
        while self.running and asyncio.get_running_loop().time() < give_up_at:
            abort_calls(self.state)
            if self.state.engine is not None:
                await self.state.engine.abort_all()
            done, _ = await asyncio.wait(self.running, timeout=_ABORT_EVERY_S)
            for task in sorted(done, key=lambda task: get_index(self.running[task].original)):
                original, group = self.running.pop(task).original, task.result()
                self.state.forget(original)
                if not any(s.status is Sample.Status.ABORTED for s in group):
                    self.finished.append(group)
                ended.append(resumable(original, group))
        if self.running:
            logger.warning(
                "%d groups did not end within --rollout-deadline-s and are cancelled", len(self.running)
            )
            ended += [resumable(entry.original, entry.original) for entry in self.running.values()]
            await self.cancel()
        return ended

    async def cancel(self) -> None:
        """Cancels the running groups and waits until they have ended. Their results and errors are ignored."""
        tasks = list(self.running)
        for entry in self.running.values():
            self.state.forget(entry.original)
        self.running.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_ABORT_EVERY_S)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()  # marks the error as seen; the rollout raises its first error

    def put_back(self, groups: list[SampleGroup]) -> None:
        ages.mark_start(groups, self.rollout_id)
        self.data_source.add_samples(groups)
        self.state.events.add("put_back", groups=[get_number(group) for group in groups])
