"""The interface by which other processes than the manager generate the groups of the stream."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from slime.rollout.state import GenerateState
from slime.rollout.stream.groups import StreamGroup, get_number
from slime.types import SampleGroup


class QueuedWork:
    """The groups of a queue that this process generates: a part of the manager's `GenerateState`, if it has a queue.
    Subclasses are in slime.rollout.straw."""

    async def leave(self) -> None:
        """Stores the tokens of the groups that are generated now, because this process ends."""
        raise NotImplementedError

    async def close(self) -> None:
        """Ends the threads and files. No group is running."""
        raise NotImplementedError

    def take_metrics(self) -> Mapping[str, float]:
        """Returns the counts since the last call."""
        return {}


class RemoteGroups(QueuedWork):
    """Generates groups in whichever process takes them: the same part, in the process with the stream."""

    async def finish(self, entry: StreamGroup, rollout_id: int) -> SampleGroup:
        """Returns the group with its responses and rewards. Its samples are ABORTED if the rollout ends first."""
        raise NotImplementedError

    def note_checkpoint(self, outstanding: Collection[int]) -> None:
        """Forgets all groups that were answered and are not in `outstanding`, which a checkpoint will draw again."""
        raise NotImplementedError


def leave_queue(state: GenerateState) -> bool:
    """Stores the tokens of unfinished groups in the queue. Returns False in a process without a queue."""
    if (work := state.has_part(QueuedWork)) is None:
        return False
    state.run(work.leave())
    return True


def note_checkpoint(state: GenerateState, outstanding: Sequence[SampleGroup]) -> None:
    """Calls `RemoteGroups.note_checkpoint` in a run with a queue."""
    if isinstance(work := state.has_part(QueuedWork), RemoteGroups):
        work.note_checkpoint({get_number(group) for group in outstanding})


def close_queue(state: GenerateState) -> None:
    """Ends the part that a process with a queue has."""
    if (work := state.has_part(QueuedWork)) is not None:
        state.run(work.close())
        state.drop_part(QueuedWork)
