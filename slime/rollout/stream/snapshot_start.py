"""Begins the snapshots of a run: connects them with the stream and with the data source."""

from __future__ import annotations

from pathlib import Path

from slime.protocols import DataSource
from slime.rollout.state import GenerateState
from slime.rollout.stream import stream
from slime.rollout.stream.groups import StreamGroup, get_number, hash_prompts
from slime.rollout.stream.parts import SHARE, AnswersSoFar
from slime.rollout.stream.remote import QueuedWork
from slime.rollout.stream.snapshot_file import NAME
from slime.rollout.stream.snapshots import Snapshots
from slime.types import SampleGroup


def begin_snapshots(state: GenerateState, data_source: DataSource, start: int) -> None:
    """Opens the snapshot of the run that `start` resumes, and takes further snapshots every --rollout-snapshot-s
    seconds. The data source has loaded its position before.

    The data source of a plug-in may lack a buffer and the numbers of its groups. Then the snapshots have only the
    groups of the stream, and a group of the snapshot waits until its number is drawn again.
    """
    assert state.config.logging.run_dir is not None
    path = Path(state.config.logging.run_dir).resolve() / NAME
    buffer: list[SampleGroup] = getattr(data_source, "buffer", [])
    saved = {get_number(group) for group in buffer}
    first_new = getattr(data_source, "next_group_index", 0)

    def find_groups() -> list[StreamGroup]:
        version = state.version or 0
        now: list[SampleGroup] = getattr(data_source, "buffer", [])
        waiting = [StreamGroup(group, version, group, hash_prompts(group), is_ready=True) for group in now]
        return [*stream.unfinished(state), *waiting]

    def is_live(number: int) -> bool:
        return number >= first_new or number in saved

    own = getattr(data_source, "snapshot", None)  # an attribute of a plug-in may have another meaning
    known: dict[str, str] = own if isinstance(own, dict) else {}
    snapshots = state.part(Snapshots, lambda: Snapshots(state, path, find_groups))
    snapshots.open(start, known.get("run"), known.get("path"), is_live)
    if state.config.rollout.rollout_data_transport == "straw":
        from slime.rollout.straw.begin import begin_queue  # needs the package straw

        begin_queue(state, snapshots, start, known.get("run"), is_live)
    if isinstance(own, dict) and hasattr(data_source, "snapshot"):
        data_source.snapshot = {"run": snapshots.run, "path": str(path)}
    every_s = state.config.fault_tolerance.rollout_snapshot_s
    if state.has_part(QueuedWork) is not None or not every_s:
        return  # the queue has the tokens
    if not state.config.kernels.rlk_bitwise:  # an unfinished answer starts again there
        state.part(AnswersSoFar, lambda: AnswersSoFar(every_s * SHARE))
    snapshots.start(every_s)
