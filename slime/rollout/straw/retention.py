"""Lets the files of groups be removed that a checkpoint has (--rollout-queue-online-gc).

The package straw keeps every answer until its consumer has processed it. Here the consumer is the run's checkpoints: a
group that a saved data position does not draw again is processed.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from straw import Coordinator, Record, SharedFilesystemStore

CONSUMER = "training"
"""The name of the consumer whose progress straw's garbage collection follows."""


class Retention:
    """The answers of a queue in the order in which they came, and those that may be removed."""

    def __init__(self, queue: Coordinator, store: SharedFilesystemStore, owner: str) -> None:
        self._queue, self._store = queue, store
        self._token = queue.open_consumer(CONSUMER, exclusive_owner=owner)
        state = queue.load_consumer_state(CONSUMER)
        self.cursor: int = 0 if state is None else state["processed_cursor"]
        """The number of answers that are processed; answers are in order."""
        self._groups: list[int] = []
        """The groups of the answers after `cursor`."""

    def add(self, number: int) -> None:
        """Stores the group number of the next answer."""
        self._groups.append(number)

    def release(self, kept: Collection[int]) -> int:
        """Releases all answers before the first answer of a group in `kept`, and removes the files that are full and
        have no other group. Returns the number of removed bytes."""
        done = next((i for i, number in enumerate(self._groups) if number in kept), len(self._groups))
        if done:
            self.cursor += done
            del self._groups[:done]
            name = f"processed-{self.cursor}"
            record = Record(name, json.dumps({}).encode(), codec="json.v1")
            state = self._store.publish([record], submission_id=name)
            self._queue.save_consumer_state(
                CONSUMER,
                token=self._token,
                request_id=name,
                state_ref=state,
                fetch_cursor=self.cursor,
                processed_cursor=self.cursor,
            )
        return int(self._queue.collect_garbage()["reclaimed_bytes"])
