"""Opens the queue of a run in the rollout manager, with the groups that an earlier start of the run has left."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from slime.rollout.state import GenerateState
from slime.rollout.straw.folder import (
    folder_for,
    make_private,
    queue_settings,
    read_plain,
    require_own,
    require_settings,
    write_plain,
)
from slime.rollout.straw.groups import join_answer, snapshot_record
from slime.rollout.straw.mailbox import DirectLink, Postman
from slime.rollout.straw.queue import RolloutQueue
from slime.rollout.straw.service import QueueService
from slime.rollout.straw.storage import DAMAGED, Reference, Storage
from slime.rollout.straw.worker import QueueWorker
from slime.rollout.stream.remote import QueuedWork
from slime.rollout.stream.sampling_settings import sampling_settings
from slime.rollout.stream.snapshot_file import Record
from slime.rollout.stream.snapshots import Snapshots

logger = logging.getLogger(__name__)
OWN_HOST = "trainer"
"""Name of the manager's own process among the hosts."""


def begin_queue(
    state: GenerateState, snapshots: Snapshots, start: int, run: str | None, is_live: Callable[[int], bool]
) -> RolloutQueue:
    """Opens the queue of the run that starts at rollout `start`, and begins to generate. `run` is the id in the
    checkpoint's data position. `is_live` returns False for a group that was trained or dropped before it.

    Raises ValueError for the queue of another run, or one with other settings.
    """
    config, folder = state.config, folder_for(state.config)
    make_private(folder.path)
    folder.hosts.mkdir(exist_ok=True, mode=0o700)
    run_dir = str(Path(config.logging.run_dir or ".").resolve())
    found = read_plain(folder.queue)
    if found is not None:
        require_own(found, run, run_dir, start, config.checkpoint.overwrite)
        require_settings(found, config)
        snapshots.run = found["run"]
    number = 1 if found is None else found["starts"] + 1
    sampling = dict(sampling_settings(config))
    own = {"run": snapshots.run, "run_dir": run_dir, "starts": number, "sampling": sampling}
    write_plain(folder.queue, {**own, **queue_settings(config)})
    lease_s = config.rollout.rollout_queue_lease_seconds
    storage = Storage(folder, config)
    service = QueueService(storage, state.events, lease_s, removes=config.rollout.rollout_queue_online_gc)
    queue = RolloutQueue(state, folder, service, storage, number)
    queue.service.on_answer = queue.deliver
    left = queue.service.begin(again=(folder.store / "control" / "journal.log").exists())
    if found is not None and found["sampling"] != sampling:
        logger.warning("the flags of sampling changed, so the groups of %s start again", folder.path)
    else:
        _offer(snapshots, storage, left, is_live)
    _start_work(queue, lease_s)
    write_plain(folder.state, {"start": number, "ended": False})
    return queue


def _offer(
    snapshots: Snapshots,
    storage: Storage,
    left: Mapping[int, Sequence[Reference]],
    is_live: Callable[[int], bool],
) -> None:
    """Lets the run continue the groups that an earlier start has left in the queue, when it draws them again."""
    live = [number for number in left if is_live(number)]
    for number in live:
        snapshots.queued[number] = lambda number=number: _read(storage, left[number])  # type: ignore[misc]
    snapshots.waiting.update(live)
    if left:
        logger.info("the queue has %d groups of earlier starts; %d of them may go on", len(left), len(live))


def _read(storage: Storage, references: Sequence[Reference]) -> Record | None:
    """Returns the newest tokens of a group, or None if they are damaged."""
    try:
        texts = [storage.read_now(reference) for reference in references]
    except DAMAGED as error:
        logger.warning("a group of the queue is damaged, so it starts again: %s", error)
        return None
    return join_answer(*texts) if len(texts) == 2 else snapshot_record(texts[0])


def _start_work(queue: RolloutQueue, lease_s: float) -> None:
    """Starts the manager's own generation, and the thread that serves other hosts."""
    state, storage, service = queue.state, queue.storage, queue.service
    queue.worker = QueueWorker(state, DirectLink(OWN_HOST, service.call, storage.run), storage, lease_s)
    queue.postman = Postman(queue.folder, queue.start, service.call)
    state.part(QueuedWork, lambda: queue)
    queue.work = state.submit(queue.worker.run())

    def report(work: Future[None]) -> None:
        if not work.cancelled() and (error := work.exception()) is not None and state.loop is not None:
            logger.error("the manager's own generation failed", exc_info=error)
            state.loop.call_soon_threadsafe(queue.fail, error)

    queue.work.add_done_callback(report)
