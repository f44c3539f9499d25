"""Stores the unfinished groups of a run every --rollout-snapshot-s seconds, and gives their tokens to a run that
resumes.

A snapshot changes nothing about which groups a run draws: the data position of the checkpoint decides it, with or
without a snapshot. When the resumed run draws a group, `restore` looks the group up by its number and adds the stored
tokens. Therefore no snapshot, of any age, can lose a group, draw it twice, or bring back a group that was trained.

A sample restarts, and is counted, in these cases:

- Its tokens come from weights that are further from the engines' weights than --max-staleness allows. These weights may
  be newer than the engines', because training after the checkpoint is repeated.
- It is in a custom generate function, such as an agent's: the state of its conversation is not stored. It counts as
  whole only once it has its reward.
- Its prompt, or a setting of sampling that its log-probs depend on, has changed.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from slime.rollout.generate import FINISHED, add_answer
from slime.rollout.state import GenerateState, random_stream, rollout_sampling_params
from slime.rollout.stream import snapshot_file
from slime.rollout.stream.groups import StreamGroup, get_number, restarted
from slime.rollout.stream.parts import AnswersSoFar
from slime.rollout.stream.restoring import restore_group
from slime.rollout.stream.sampling_settings import sampling_settings
from slime.rollout.stream.snapshot_file import Record, SnapshotFile, SnapshotHeader, Text
from slime.types import Sample, SampleGroup

logger = logging.getLogger(__name__)


@dataclass
class GroupCopy:
    """A group at one moment. Its samples are copies, which generation does not change."""

    number: int
    prompts: str
    """Hash of the group's prompts, see `hash_prompts`."""
    version: int
    samples: SampleGroup
    restarts: int = 0
    """Number of samples whose state cannot be stored."""

    @property
    def tokens(self) -> int:
        return sum(sample.response_length for sample in self.samples)

    @property
    def key(self) -> object:
        """Returns a value that changes whenever the content of the group changes."""
        return tuple((s.index, s.response_length, s.status.value, s.reward is not None) for s in self.samples)

    def text(self) -> bytes:
        """Returns the group's line. The samples are converted one by one, so that no call holds the interpreter for
        long."""
        head = snapshot_file.sample_text(
            {"group": self.number, "prompts": self.prompts, "version": self.version}
        )
        parts = [head[:-1], ', "samples": [']
        for position, sample in enumerate(self.samples):
            parts += [", "] * bool(position) + [snapshot_file.sample_text(sample.to_dict())]
        return snapshot_file.join([*parts, "]}"])


@dataclass
class Snapshots:
    """The snapshots of a run: a part of its `GenerateState`. `groups` returns the unfinished groups at the moment of a
    call, in the thread of the event loop."""

    state: GenerateState
    path: Path
    groups: Callable[[], Sequence[StreamGroup]]
    run: str = field(default_factory=lambda: secrets.token_hex(8))
    """The id of the run. The data positions of its checkpoints have it, too."""
    waiting: set[int] = field(default_factory=set)
    """Groups of the file that a resumed run has not drawn yet."""
    queued: dict[int, Callable[[], Record | None]] = field(default_factory=dict)
    """Groups that the rollout queue has, which are read when they are drawn."""
    _metrics: dict[str, float] = field(default_factory=dict)
    _task: Future[None] | None = None
    _busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    _held: list[GroupCopy] | None = None
    _unplain: bool = False

    def __post_init__(self) -> None:
        self._file = SnapshotFile(self.path)

    def open(self, start: int, run: str | None, path: str | None, is_live: Callable[[int], bool]) -> None:
        """Finds the groups that a run which starts at rollout `start` may continue.

        `run` and `path` are the id and the snapshot's path in the data position of the checkpoint. `is_live` returns
        False for a group that was trained or dropped before the checkpoint.
        """
        self.run = run or self.run
        found = self._file if self.path.is_file() or path is None else SnapshotFile(Path(path))
        if (header := found.load()) is None:
            return
        if problem := self._find_problem(header, start, run):
            logger.warning("%s is not used, and its groups start again: %s", found.path, problem)
            return
        self.run = header.run
        if found is not self._file:  # the run directory has a new name
            self._file = found.copy(self.path)
        self.waiting = {number for number in self._file.lines if is_live(number)}
        logger.info(
            "%s has %d unfinished groups of rollout %d; %d of them were trained or dropped before the checkpoint",
            *(found.path, len(self._file.lines), header.rollout, len(self._file.lines) - len(self.waiting)),
        )

    def _find_problem(self, header: SnapshotHeader, start: int, run: str | None) -> str | None:
        """Returns why a snapshot does not belong to the run, or None."""
        config = self.state.config
        if start > 0 and header.run != run:
            return f"run {header.run} wrote it, and the checkpoint is of run {run or 'without an id'}"
        if start == 0 and config.checkpoint.overwrite:
            return "--overwrite starts another run"
        now = sampling_settings(config)
        changed = [name for name, value in now.items() if header.sampling.get(name) != value]
        return f"{', '.join(changed)} changed" if changed else None

    def restore(self, entry: StreamGroup, rollout_id: int, limit: int) -> None:
        """Gives a group that was drawn now, for rollout `rollout_id` or a later one, the tokens that a snapshot has for
        it. `limit` is the largest distance of weights in updates."""
        number = get_number(entry.original)
        if number not in self.waiting:
            return
        self.waiting.discard(number)
        record = self.queued.pop(number)() if number in self.queued else self._file.read(number)
        if record is None or record["prompts"] != entry.prompts:
            logger.warning("the snapshot's group %d has another prompt, so the group starts again", number)
            self._count("samples_restarted", len(entry.original))
            return
        samples = [Sample.from_dict(fields) for fields in record["samples"]]
        found = restore_group(entry, samples, record["version"], self.state, rollout_id, limit)
        self._count("samples_restarted", found.restarted)
        self._count("samples_restored", found.samples)
        self._count("tokens_restored", found.tokens)

    def _count(self, name: str, count: float) -> None:
        name = f"rollout/snapshot/{name}"
        self._metrics[name] = self._metrics.get(name, 0.0) + count

    def take_metrics(self) -> dict[str, float]:
        """Returns the counts and times since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def start(self, every_s: float) -> None:
        """Takes a snapshot every `every_s` seconds, until `stop`."""
        self.stop()
        self._task = self.state.submit(self._repeat(every_s))

    def stop(self) -> None:
        """Takes no further snapshot."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _repeat(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            await self.take()

    async def take(self) -> None:
        """Stores the unfinished groups. Only the copies of the groups are made in the event loop, one group at a time;
        a thread converts and writes them. A full disk costs the snapshot and not the run."""
        async with self._busy:
            began = time.perf_counter()
            waiting = set(
                self.waiting
            )  # before the copies: a group that is drawn meanwhile is in one of the two
            copies, in_loop = await self._copy_groups()
            if not copies and not waiting:
                await asyncio.to_thread(self._file.remove)
                return
            try:
                size = await asyncio.to_thread(self._write, copies, waiting)
            except OSError as error:
                logger.warning("the snapshot %s was not written: %s", self.path, error)
                return
            seconds = time.perf_counter() - began
            self._metrics |= {
                "perf/snapshot_time": seconds,
                "perf/snapshot_loop_time": in_loop,
                "perf/snapshot_mib": size / 2**20,
            }
            self.state.events.add(
                "snapshot",
                groups=sorted({*waiting, *(one.number for one in copies)}),
                tokens=sum(one.tokens for one in copies),
                bytes=size,
                seconds=round(seconds, 4),
            )

    def hold(self) -> None:
        """Copies the groups now. The next snapshot has these copies, because a rollout that fails ends its groups."""
        self._held = [copy_group(entry, self.state) for entry in self.groups()]

    def release(self) -> None:
        """Undoes `hold`, because another rollout begins."""
        self._held = None

    async def _copy_groups(self) -> tuple[list[GroupCopy], float]:
        """Returns the groups with tokens, and the seconds that the event loop spent on them."""
        copies, busy = list[GroupCopy](), 0.0
        if self._held is not None:
            return [one for one in self._held if one.tokens or one.restarts], busy
        for entry in self.groups():
            began = time.perf_counter()
            made = copy_group(entry, self.state)
            if made.tokens or made.restarts:
                copies.append(made)
            busy += time.perf_counter() - began
            await asyncio.sleep(0)
        return copies, busy

    def _write(self, copies: Sequence[GroupCopy], waiting: set[int]) -> int:
        """Writes the copies, and the groups `waiting` as they are in the file."""
        same, texts = set(waiting), dict[int, Text]()
        for one in copies:
            if one.key == self._file.get_key(one.number):
                same.add(one.number)
                continue
            try:
                texts[one.number] = Text(one.key, one.text())
            except ValueError as error:
                if not self._unplain:
                    logger.warning("groups such as %d are in no snapshot: %s", one.number, error)
                self._unplain = True
        header = SnapshotHeader(self.run, sampling_settings(self.state.config), self.state.allowed)
        return self._file.write(header, texts, same)


def copy_group(entry: StreamGroup, state: GenerateState) -> GroupCopy:
    """Returns a copy of the group. A sample whose state cannot be stored is as the data source returned it."""
    flags = state.config.rollout
    samples, restarts = list[Sample](), 0
    for sample in entry.group:
        path = sample.generate_function_path or flags.custom_generate_function_path
        started = sample.response_length > 0 or path is not None
        whole = entry.is_ready or sample.reward is not None
        hooks = flags.rollout_sample_hook_path and sample.status in FINISHED
        if whole:
            samples.append(copy_sample(sample))
        elif path is None and not hooks:
            samples.append(copy_running(sample, state))
        else:
            samples.append(restarted(sample))
            restarts += started
    return GroupCopy(get_number(entry.original), entry.prompts, entry.version, samples, restarts)


def copy_running(sample: Sample, state: GenerateState) -> Sample:
    """Returns a copy with the tokens that the engine has reported for the sample's running request."""
    copied = copy_sample(sample)
    answers = state.has_part(AnswersSoFar)
    part = None if answers is None else answers.read(random_stream(sample))
    if part is not None and sample.tokens and copied.status not in FINISHED:
        add_answer(copied, part, state, rollout_sampling_params(state.config.rollout))
    return copied if copied.response_length else restarted(sample)


def copy_sample(sample: Sample) -> Sample:
    """Returns a copy that does not change when generation continues. Arrays are shared, because they are replaced and
    never changed. An unfinished sample counts as aborted, so that it continues after its last token."""
    copied = copy.copy(sample)
    for name, value in vars(sample).items():
        if isinstance(value, list):
            setattr(copied, name, list(value))
    copied.columns = {name: list(values) for name, values in sample.columns.items()}
    copied.metadata, copied.train_metadata = copy.deepcopy((sample.metadata, sample.train_metadata))
    copied.spec_info, copied.prefix_cache_info = (
        copy.copy(sample.spec_info),
        copy.copy(sample.prefix_cache_info),
    )
    if copied.status not in FINISHED:
        copied.status = Sample.Status.ABORTED
    return copied
