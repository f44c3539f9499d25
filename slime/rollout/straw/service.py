"""The owner's side of the queue: tasks, leases and answers. The rollout manager's process has the only service.

A host that stops renewing its lease loses it after --rollout-queue-lease-seconds, and the next host takes the task over
with the tokens that were saved last. Only the answer of the present lease counts: an answer of an older lease is
discarded and counted, so no group has two answers.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field

from straw import Coordinator, RecordSetRef, TaskSpec
from straw.errors import CorruptData, LeaseExpired, QueueError, StaleAttempt, UnsafeRecovery
from straw.protocol import Lease

from slime.records.errors import FlagError
from slime.rollout.straw.folder import RUN_ID, Plain
from slime.rollout.straw.retention import Retention
from slime.rollout.straw.storage import Reference, Storage
from slime.tracking.events import Events

MOST_LEASES = 10
"""Number of leases after which a group counts as the cause of its hosts' deaths, and ends the run."""
LATE = (StaleAttempt, LeaseExpired)
OnAnswer = Callable[[str, Reference | None, str], None]
"""A function that gets a task, the reference of its answer or None, and a text. Without an answer, the text is the
reason why the run cannot continue, or "" if the group must be submitted again."""


@dataclass
class QueueService:
    """The tasks of a queue. Thread-safe. `on_answer` is called in the thread of the host's call."""

    storage: Storage
    events: Events
    lease_s: float
    on_answer: OnAnswer = lambda task, reference, text: None
    removes: bool = False
    """--rollout-queue-online-gc"""
    counts: Counter[str] = field(default_factory=Counter)
    """Leases, tasks that were taken over, and discarded answers since the last `take_counts`."""
    _groups: dict[str, int] = field(default_factory=dict)
    """The number of the group by its open task."""
    _leases: dict[str, list[Lease]] = field(default_factory=dict)
    """All leases of an open task; the last one is the present one."""
    _heard: dict[str, float] = field(default_factory=dict)
    """When a host called last."""

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._retention: Retention | None = None

    def begin(self, *, again: bool) -> dict[int, list[Reference]]:
        """Opens the queue, which exists if `again`. Returns the records of each group that an earlier start has left: a
        task, and its answer if it has one. Their leases end."""
        store, owner = self.storage.make_store(), uuid.uuid4().hex  # the driver holds the lock of the folder
        try:
            self._queue = Coordinator(
                store,
                exclusive_owner=owner,
                recover=again,
                lease_seconds=self.lease_s,
            )
        except (UnsafeRecovery, CorruptData) as error:
            raise FlagError(
                RUN_ID,
                "name a queue that can be opened",
                f"{self.storage.folder.path} ({error})",
                "name another queue: the run goes on from its checkpoint, without the groups of this queue",
            ) from error
        if self.removes:
            self._retention = Retention(self._queue, store, owner)
        return self._end_earlier() if again else {}

    def submit(self, task: str, number: int, reference: Reference, facts: Plain) -> None:
        """Offers a task to the hosts. Groups with lower numbers are leased first."""
        spec = TaskSpec(
            task,
            RecordSetRef.from_dict(reference),
            metadata={"group": number, **facts},
            max_attempts=MOST_LEASES,
            scheduling_key=number,
        )
        with self._lock:
            self._queue.submit_tasks(task, [spec])
            self._groups[task] = number

    def cancel(self, task: str) -> Reference | None:
        """Ends a task without an answer. Returns the newest tokens."""
        with self._lock:
            if self._groups.pop(task, None) is None:
                return None
            spec = self._queue.task_status(task)["spec"]
            self._queue.cancel_task(task, request_id=f"cancel-{task}")
            self._end_reads(task)
            return dict(spec["input_ref"])

    def call(self, host: str, operation: str, arguments: Plain) -> object:
        """Performs an operation of a host, and returns plain data."""
        operations: dict[str, Callable[..., object]] = {
            "lease": self._lease,
            "renew": self._renew,
            "save": self._save,
            "answer": self._answer,
            "damaged": self._damaged,
            "leave": self._leave,
        }
        with self._lock:
            self._heard[host] = time.monotonic()
            return operations[operation](host, **arguments)

    def hosts(self) -> int:
        """Returns the number of hosts that have called within the time of a lease."""
        oldest = time.monotonic() - self.lease_s
        return sum(heard > oldest for heard in self._heard.values())

    def take_counts(self) -> dict[str, float]:
        """Returns the counts since the last call."""
        with self._lock:
            counts, self.counts = self.counts, Counter()
        names = ("leases", "taken_over", "discarded", "damaged")
        return {"hosts": float(self.hosts()), **{name: float(counts[name]) for name in names}}

    def release(self, kept: Collection[int]) -> int:
        """Calls `Retention.release`, with --rollout-queue-online-gc."""
        if self._retention is None:
            return 0
        with self._lock:
            return self._retention.release(kept)

    def close(self) -> None:
        with self._lock:
            self._queue.close()

    def _lease(self, host: str, count: int, held: int) -> list[Plain]:
        """Leases up to `count` tasks to a host that has `held` tasks. No host gets more than its share of the open
        tasks."""
        share = math.ceil(len(self._groups) / max(1, self.hosts())) - held
        if (wanted := min(count, share)) <= 0:
            return []
        found = []
        for assignment in self._queue.acquire(host, wanted).assignments:
            lease, task = assignment.lease, assignment.task
            if task.task_id not in self._groups:
                continue
            again = len(self._leases.setdefault(task.task_id, []))
            self._leases[task.task_id].append(lease)
            self.counts.update(["leases"] + ["taken_over"] * bool(again))
            self.events.add("leased", groups=[self._groups[task.task_id]], host=host, attempt=again + 1)
            found.append({"lease": asdict(lease), "task": asdict(task.input_ref), "facts": task.metadata})
        self._end_hopeless()
        return found

    def _renew(self, host: str, leases: Iterable[Plain]) -> list[bool]:
        """Renews leases. The result has False for a lease that is lost."""
        named = [Lease(**lease) for lease in leases]
        return [state == "extended" for state in self._queue.heartbeat(named)] if named else []

    def _save(self, host: str, lease: Plain, reference: Reference) -> bool:
        """Replaces the content of a task with one that has more tokens. Returns False for a lost lease."""
        held = Lease(**lease)
        try:
            self._queue.save_task_progress(
                held, request_id=uuid.uuid4().hex, input_ref=RecordSetRef.from_dict(reference)
            )
        except LATE:
            return False
        return True

    def _answer(self, host: str, lease: Plain, reference: Reference) -> bool:
        """Takes the answer of the present lease. Returns False for the answer of another lease, which is discarded."""
        held, ref = Lease(**lease), RecordSetRef.from_dict(reference)
        try:
            self._queue.complete_task(
                held, submission_id=held.attempt_id, result_ref=ref, result_digest=ref.digest
            )
        except LATE as error:
            ended = held.task_id not in self._groups
            self.discard(host, int(held.task_id.split(".")[0]), "ended" if ended else "lease", str(error))
            return False
        except QueueError as error:
            self.discard(host, self._groups.get(held.task_id, -1), "damaged", str(error))
            self._queue.fail_task(held, request_id=uuid.uuid4().hex, failure=str(error))
            return False
        if self._groups.pop(held.task_id, None) is not None:
            if self._retention is not None:
                self._retention.add(int(held.task_id.split(".")[0]))
            self._end_reads(held.task_id)
            self.on_answer(held.task_id, reference, "")
        return True

    def _damaged(self, host: str, lease: Plain, text: str) -> None:
        """Ends a task whose content a host cannot read. Its owner submits it again."""
        held = Lease(**lease)
        if held.task_id in self._groups:
            self.discard(host, self._groups[held.task_id], "damaged", text)
            self.cancel(held.task_id)
            self.on_answer(held.task_id, None, "")

    def _leave(self, host: str, leases: Iterable[Plain]) -> None:
        """Returns the tasks of a host that ends."""
        named = [Lease(**lease) for lease in leases]
        known = [state == "extended" for state in self._queue.heartbeat(named)] if named else []
        held = [lease for lease, ours in zip(named, known, strict=True) if ours]
        if held:
            self._queue.release_tasks(held, request_id=uuid.uuid4().hex)
        self._heard.pop(host, None)

    def discard(self, host: str, number: int, reason: str, text: str) -> None:
        """Counts and records an answer, or a group's content, that is not used."""
        self.counts.update(["damaged" if reason == "damaged" else "discarded"])
        self.events.add("discarded", groups=[number], host=host, reason=reason, text=text[:500])

    def _end_hopeless(self) -> None:
        """Ends the tasks that MOST_LEASES hosts have lost."""
        for task, leases in list(self._leases.items()):
            if len(leases) < MOST_LEASES or self._queue.task_status(task)["state"] != "failed":
                continue
            number = self._groups.pop(task)
            self._end_reads(task)
            self.on_answer(
                task,
                None,
                f"group {number} was lost by {MOST_LEASES} leases of rollout hosts; see their logs",
            )

    def _end_reads(self, task: str) -> None:
        """Lets the files of a task's content be removed. A host that still reads gets an error, and its lease is lost
        anyway."""
        self._queue.release_task_reads(self._leases.pop(task, []))

    def _end_earlier(self) -> dict[int, list[Reference]]:
        """Ends the tasks of the run's earlier starts. Returns the references to their inputs and answers, by group."""
        found: dict[int, list[Reference]] = {}
        tasks = self._queue.tasks
        answers: dict[str, Reference] = {}
        cursor, ended = 0 if self._retention is None else self._retention.cursor, False
        while not ended:
            page = self._queue.read_commits(cursor, 1000)
            for commit in page.commits:
                answers[commit.task_id] = asdict(commit.result_ref)
                if self._retention is not None:
                    self._retention.add(int(commit.task_id.split(".")[0]))
            ended, cursor = len(page.commits) < 1000, page.cursor
        for task in sorted(tasks, key=_start_and_index):
            spec, state = tasks[task]["spec"], tasks[task]["state"]
            if state != "completed" or task in answers:  # otherwise its files are removed
                found[spec["metadata"]["group"]] = [spec["input_ref"], *filter(None, [answers.get(task)])]
            if state not in ("completed", "cancelled", "failed"):
                self._queue.cancel_task(task, request_id=f"end-{task}")
        self._queue.release_task_reads(self._queue.outstanding_reads())
        return found


def name_task(number: int, start: int, index: int) -> str:
    """Returns the name of a task: group, start of the run, count of the start's tasks."""
    return f"{number}.{start}.{index}"


def _start_and_index(task: str) -> tuple[int, ...]:
    """Returns the key by which tasks are sorted in the order in which they were submitted."""
    return tuple(map(int, task.split(".")[1:]))
