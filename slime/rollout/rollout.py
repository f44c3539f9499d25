"""One training rollout: draw prompts, generate groups concurrently, filter, refill, abort the rest.

    data_source --draw--> pending --finish--> filter --kept--> batch of --rollout-batch-size groups
        ^                    |                  |
        |                    |                  +--dropped--> counted by reason; new groups drawn
        +--partial-rollout---+--when the batch is full, requests still running are aborted

Without --partial-rollout, groups that are running when the batch is full are discarded, as in slime. Their
prompts return in the next epoch. With --partial-rollout, these groups return to the data source with their
tokens, and so does a group that finished after the batch was full.
"""

from __future__ import annotations

import asyncio
import logging

from slime.config.schema import section_of
from slime.config.sections.data import DataConfig
from slime.config.sections.rollout import RolloutConfig
from slime.hooks import load_function
from slime.protocols import DataSource
from slime.rollout import generate
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.filter_hub.base_types import (
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.metrics import statistics_of
from slime.rollout.state import GenerateState, rollout_sampling_params
from slime.types import Sample, SampleGroup

logger = logging.getLogger(__name__)

MAX_BARREN_BATCHES = 32
"""A rollout raises an error after it has dropped this many times --rollout-batch-size groups in a row."""

MIN_LATE_GROUPS = 8
"""A rollout raises an error after max(this, --rollout-batch-size) groups in a row have passed their deadline."""

_ABORT_EVERY_S = 1.0


async def generate_rollout_async(
    state: GenerateState, rollout_id: int, data_source: DataSource
) -> RolloutFnTrainOutput:
    """`--rollout-batch-size` groups that passed the filter, sorted by index, and the counts of dropped groups.

    Deterministic if the engine is and no request is aborted. With --over-sampling-batch-size above
    --rollout-batch-size, the groups that finish first are used. An error of a reward, filter or generate function
    names the sample. RuntimeError if the filter drops every group. TimeoutError if a whole batch of groups in
    a row (at least 8) passes --rollout-deadline-s.
    """
    state.begin()
    rollout = _Rollout(state, rollout_id, data_source)
    try:
        await rollout.collect()
        return await rollout.finish()
    finally:
        state.aborted = True
        await rollout.cancel()
        state.end()


class _Rollout:
    """The state of one rollout: running groups, kept groups, and the counts of dropped groups by reason. `args` go to
    hooks."""

    def __init__(self, state: GenerateState, rollout_id: int, data_source: DataSource) -> None:
        self.state, self.args = state, state.args
        self.flags = section_of(RolloutConfig, state.args)
        data = section_of(DataConfig, state.args)
        self.rollout_id, self.data_source = rollout_id, data_source
        self.target, self.group_size = data.rollout_batch_size, data.n_samples_per_prompt
        self.pending: dict[asyncio.Task[SampleGroup], SampleGroup] = {}
        self.kept: list[SampleGroup] = []
        self.surplus: list[SampleGroup] = []
        self.finished: list[SampleGroup] = []
        self.metrics = MetricGatherer()
        self.barren = 0
        self.late = 0
        path = self.flags.dynamic_sampling_filter_path
        self.filter = load_function(path, flag="--dynamic-sampling-filter-path") if path else None

    async def collect(self) -> None:
        """Draw groups while too few are pending, and take finished groups, until the batch is full."""
        wanted = self.target * self.group_size
        while len(self.kept) < self.target:
            while len(self.kept) + len(self.pending) < self.target:
                self.draw()
            done, _ = await asyncio.wait(self.pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: _index(self.pending[task])):
                self.take(self.pending.pop(task), task.result())
            self.state.progress = (len(self.kept) * self.group_size, wanted)

    def draw(self) -> None:
        """Start generation of the next --over-sampling-batch-size groups of the data source."""
        groups = self.data_source.get_samples(self.flags.over_sampling_batch_size or self.target)
        if not groups:
            raise ValueError(
                "--data-source-path must return groups from get_samples, got none; it has run dry"
            )
        for group in groups:
            if self.is_stale(group):
                self.drop("stale")
                continue
            work = generate.generate_and_rm_group(
                self.args, group, rollout_sampling_params(self.flags), rollout_id=self.rollout_id
            )
            self.pending[asyncio.create_task(work)] = group

    def is_stale(self, group: SampleGroup) -> bool:
        """Whether a complete group from the buffer has waited longer than --max-staleness allows.

        --partial-rollout needs a staleness of one rollout. A group with an unfinished sample is never stale, because
        it continues with the current weights.
        """
        started: list[int] = [
            s.metadata["start_rollout_id"] for s in group if "start_rollout_id" in s.metadata
        ]
        if not started or any(s.status not in generate.FINISHED for s in group):
            return False
        allowed = max(self.flags.max_staleness, 1)
        return self.rollout_id - min(started) > allowed

    def take(self, given: SampleGroup, group: SampleGroup) -> None:
        """Keep or drop a finished group, or add it to the surplus. `given` is the group as it was drawn."""
        if any(s.status is Sample.Status.ABORTED for s in group):
            self.give_up(given, group)
            return
        self.late = 0
        self.finished.append(group)
        if len(self.kept) == self.target:
            self.surplus.append(self.resumable(given, group))
            return
        output = call_dynamic_filter(self.filter, self.args, group)
        left = len(self.kept) + len(self.pending) + 1
        if should_drop_dynamic_filter_output(output, left, self.target):
            self.drop(output.reason or "filtered")
            return
        self.kept.append(group)
        self.barren = 0

    def give_up(self, given: SampleGroup, group: SampleGroup) -> None:
        """Drop a group that its deadline, or an abort from outside, ended before the batch was full.

        A late group does not return to the buffer, because it would come first in each rollout and be late again.
        """
        reasons = [self.state.timed_out[s.index] for s in group if s.index in self.state.timed_out]
        self.late += bool(reasons)
        if reasons and self.late >= max(self.target, MIN_LATE_GROUPS):
            raise TimeoutError(
                f"--rollout-deadline-s must suffice for a response, got {self.flags.rollout_deadline_s} s and "
                f"{self.late} groups in a row that passed it; last: {reasons[-1]}"
            )
        if self.flags.partial_rollout and not reasons:
            self.put_back([self.resumable(given, group)])
        self.drop("deadline" if reasons else "aborted")

    def drop(self, reason: str) -> None:
        self.metrics.on_dynamic_filter_drop(reason)
        self.barren += 1
        if self.barren >= MAX_BARREN_BATCHES * self.target:
            counts = ", ".join(f"{reason}: {count}" for reason, count in self.metrics.drops.most_common())
            raise RuntimeError(
                f"--dynamic-sampling-filter-path must keep some groups, got none in {self.barren} in a "
                f"row ({counts}); check the rewards, the difficulty of the prompts, or the filter"
            )

    async def finish(self) -> RolloutFnTrainOutput:
        """Abort the running groups, put them back or discard them, and run the hooks on the batch."""
        self.state.aborted = True
        cut_off = await self.end_pending() + self.surplus
        metrics: dict[str, float] = {**self.metrics.collect()}
        if cut_off and self.flags.partial_rollout:
            self.put_back(sorted(cut_off, key=_index))
            metrics["rollout/partial/groups_put_back"] = len(cut_off)
        elif cut_off:
            metrics["rollout/partial/groups_discarded"] = len(cut_off)
        for figure, values in self.state.request_figures.items():
            metrics |= {f"perf/{figure}/{name}": value for name, value in statistics_of(values).items()}
        self.kept.sort(key=_index)
        if path := self.flags.rollout_sample_filter_path:
            load_function(path, flag="--rollout-sample-filter-path")(self.args, self.kept)
        if path := self.flags.rollout_all_samples_process_path:
            hook = load_function(path, flag="--rollout-all-samples-process-path")
            hook(self.args, sorted(self.finished, key=_index), self.data_source)
        return RolloutFnTrainOutput(samples=self.kept, metrics=metrics)

    async def end_pending(self) -> list[SampleGroup]:
        """Abort every request until all groups have returned. After --rollout-deadline-s, cancel the rest.

        The abort repeats, because a generate function with several turns sends its next request after an abort.
        """
        give_up_at = asyncio.get_running_loop().time() + self.flags.rollout_deadline_s
        ended = []
        while self.pending and asyncio.get_running_loop().time() < give_up_at:
            if self.state.engine is not None:
                await self.state.engine.abort_all()
            done, _ = await asyncio.wait(self.pending, timeout=_ABORT_EVERY_S)
            for task in sorted(done, key=lambda task: _index(self.pending[task])):
                given, group = self.pending.pop(task), task.result()
                if not any(s.status is Sample.Status.ABORTED for s in group):
                    self.finished.append(group)
                ended.append(self.resumable(given, group))
        if self.pending:
            logger.warning(
                "%d groups did not end within --rollout-deadline-s and are cancelled", len(self.pending)
            )
            ended += [self.resumable(given, given) for given in self.pending.values()]
            await self.cancel()
        return ended

    async def cancel(self) -> None:
        """Cancel the pending groups and wait until they have ended. Their results and errors are ignored."""
        tasks = list(self.pending)
        self.pending.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_ABORT_EVERY_S)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()  # marks the error as seen; the rollout raises its first error

    def resumable(self, given: SampleGroup, group: SampleGroup) -> SampleGroup:
        """What a later rollout can continue: the group, or its prompts if samples fanned out."""
        if len(group) != len(given):
            return [_restarted(s) for s in given]
        return group

    def put_back(self, groups: list[SampleGroup]) -> None:
        for group in groups:
            for sample in group:
                if sample.response_length:
                    sample.metadata.setdefault("start_rollout_id", self.rollout_id)
        self.data_source.add_samples(groups)


def _index(group: SampleGroup) -> int:
    return group[0].index if group[0].index is not None else -1


def _restarted(sample: Sample) -> Sample:
    """The sample as the data source first returned it."""
    return Sample(
        group_index=sample.group_index,
        index=sample.index,
        prompt=sample.prompt,
        label=sample.label,
        metadata=sample.metadata,
        multimodal_inputs=sample.multimodal_inputs,
        apply_chat_template_kwargs=sample.apply_chat_template_kwargs,
        generate_function_path=sample.generate_function_path,
        custom_rm_path=sample.custom_rm_path,
        session_id=sample.session_id,
    )
